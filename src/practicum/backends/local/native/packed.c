/* Attention of the segments of a row of texts, and its gradient: no padding, no mask, and no score of a later key.

   A segment's queries see the spans of the row above it, and its own keys up to their own place. Its keys are
   packed once for all heads that share them; BLOCK queries at a time are multiplied with those that they can see.
   The sums of a token are added in an order that depends neither on other segments nor on the number of threads. */
#include "shared.h"

#define ROWS 6
#if LANES == 16
#define COLUMNS 4 /* 24 sums, 4 columns: 32 registers */
#else
#define COLUMNS 2 /* 12 sums, 2 columns: 16 registers */
#endif
#define TILE (COLUMNS * LANES)
#define BLOCK (8 * ROWS)

typedef struct {
    const float *at;
    long token, head; /* strides */
} states;

typedef struct {
    long tokens, segments, heads, groups, width, value_width, longest;
    const int64_t *spans, *first_span; /* [spans][start, length]; a segment's own span is its last one */
    const int64_t *first_past;         /* [segments + 1]: how many keys are above the segments before */
    states queries, keys, values, gradient;
    float *outputs, *levels; /* [tokens][heads][value_width], [tokens][heads]: the logarithm of the scores' sum */
    float *query_gradient, *key_gradient, *value_gradient; /* [tokens][heads or groups][width or value_width] */
    float *past_gradient; /* [groups][keys above][width + value_width] */
    float *room;          /* [threads][measure_attention_room] */
    float scale;
} attention;

typedef struct {
    const attention *a;
    atomic_long next;
} work;

/* A segment and a group of its heads: the places of its keys, and a thread's room. */
typedef struct {
    const int64_t *spans;
    long count, start, length, past, reach, group;
    float *packed_keys, *packed_values, *keys, *values, *key_gradient, *value_gradient;
    float *scores, *score_gradient, *queries, *outputs, *gradient;
} segment;

static long pad(long count, long multiple) { return (count + multiple - 1) / multiple * multiple; }

/* out[ROWS][C vectors] (+)= x[ROWS][depth] times w[depth][C vectors]. */
static inline __attribute__((always_inline)) void multiply_tile(const int C, const float *x, long row, long step,
                                                                const float *w, long w_row, long depth, float *out,
                                                                long out_row, int add) {
    vector sums[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = add ? load(out + r * out_row + c * LANES) : (vector){0};
    for (long k = 0; k < depth; k++, x += step, w += w_row) {
        vector columns[COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) columns[c] = load(w + c * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sums[r][c] += x[r * row] * columns[c];
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(out + r * out_row + c * LANES, sums[r][c]);
}

/* The same for any number of columns up to a tile: whole vectors of them are computed. */
static void multiply(long columns, const float *x, long row, long step, const float *w, long w_row, long depth,
                     float *out, long out_row, int add) {
    switch ((columns + LANES - 1) / LANES) {
    case 1: multiply_tile(1, x, row, step, w, w_row, depth, out, out_row, add); break;
#if COLUMNS == 4
    case 2: multiply_tile(2, x, row, step, w, w_row, depth, out, out_row, add); break;
    case 3: multiply_tile(3, x, row, step, w, w_row, depth, out, out_row, add); break;
#endif
    default: multiply_tile(COLUMNS, x, row, step, w, w_row, depth, out, out_row, add);
    }
}

/* out[rows][width] (+)= x times w[depth][width]; rows are a multiple of ROWS. */
static void multiply_wide(long rows, long width, const float *x, long row, long step, const float *w, long depth,
                          float *out, int add) {
    for (long c = 0; c < width; c += TILE)
        for (long r = 0; r < rows; r += ROWS)
            multiply(width - c < TILE ? width - c : TILE, x + r * row, row, step, w + c, width, depth,
                     out + r * width + c, width, add);
}

/* scores[rows][stride] = queries times packed keys; no row tile goes beyond the keys that its last row sees. */
static void compute_scores(const float *queries, long width, long rows, long seen, const float *packed, float *scores,
                           long stride, long reach) {
    for (long key = 0; key < reach; key += TILE)
        for (long r = 0; r < rows; r += ROWS) {
            long last = seen + r + ROWS < reach ? seen + r + ROWS : reach, columns = last - key;
            if (columns > 0)
                multiply(columns < TILE ? columns : TILE, queries + r * width, width, 1, packed + key * width, TILE,
                         width, scores + r * stride + key, stride, 0);
        }
}

/* Rows of a group from the spans of the row, one after the other. */
static void gather(const segment *s, const states *from, long width, float *out) {
    for (long span = 0; span < s->count; span++)
        for (long i = 0; i < s->spans[2 * span + 1]; i++, out += width)
            memcpy(out, from->at + (s->spans[2 * span] + i) * from->token + s->group * from->head, width * sizeof(float));
}

/* Rows in tiles of columns, [ceil(reach / TILE)][width][TILE], whose last vector of columns is padded with zeros. */
static void pack(const float *rows, long reach, long width, float *out) {
    for (long first = 0; first < reach; first += TILE, rows += TILE * width, out += TILE * width) {
        long count = reach - first < TILE ? reach - first : TILE;
        for (long c = 0; c < count; c++)
            for (long i = 0; i < width; i++) out[i * TILE + c] = rows[c * width + i];
        for (long c = count; c < pad(count, LANES); c++)
            for (long i = 0; i < width; i++) out[i * TILE + c] = 0.0f;
    }
}

/* Rows of a head times a number, then rows of zeros up to a multiple of ROWS. */
static long take(const states *from, long token, long head, long width, long count, float scale, float *out) {
    long padded = pad(count, ROWS);
    for (long r = 0; r < count; r++) {
        const float *row = from->at + (token + r) * from->token + head * from->head;
        for (long i = 0; i < width; i++) out[r * width + i] = scale * row[i];
    }
    memset(out + count * width, 0, (padded - count) * width * sizeof(float));
    return padded;
}

static vector keep_first(vector v, long count) {
    integers index;
    for (int lane = 0; lane < LANES; lane++) index[lane] = lane;
    return choose(index < (integers){0} + (int32_t)count, v, fill(0.0f));
}

static long measure_thread_room(const attention *a) {
    long reach = pad(a->longest, TILE), widths = a->width + a->value_width;
    return 3 * reach * widths + 2 * BLOCK * (reach + TILE) + BLOCK * 2 * widths;
}

static segment open_segment(const attention *a, long number, float *room) {
    long segments = number % a->segments, reach = pad(a->longest, TILE);
    segment s = {.spans = a->spans + 2 * a->first_span[segments], .group = number / a->segments};
    s.count = a->first_span[segments + 1] - a->first_span[segments];
    s.start = s.spans[2 * s.count - 2], s.length = s.spans[2 * s.count - 1];
    s.past = a->first_past[segments + 1] - a->first_past[segments], s.reach = s.past + s.length;
    s.packed_keys = room, s.packed_values = room + reach * a->width;
    s.keys = s.packed_values + reach * a->value_width, s.values = s.keys + reach * a->width;
    s.key_gradient = s.values + reach * a->value_width, s.value_gradient = s.key_gradient + reach * a->width;
    s.scores = s.value_gradient + reach * a->value_width;
    s.score_gradient = s.scores + BLOCK * (reach + TILE);
    s.queries = s.score_gradient + BLOCK * (reach + TILE);
    s.outputs = s.queries + BLOCK * a->width;
    s.gradient = s.outputs + BLOCK * (a->width + a->value_width);
    gather(&s, &a->keys, a->width, s.keys);
    gather(&s, &a->values, a->value_width, s.values);
    pack(s.keys, s.reach, a->width, s.packed_keys);
    return s;
}

/* Turn scores into weights whose sum is returned in `total`, and zeros from `seen` on up to `end`. */
static float weigh(float *scores, long seen, long end, float level) {
    vector totals = {0};
    long i = 0;
    for (; i < seen; i += LANES) {
        vector weight = keep_first(exponentiate(load(scores + i) - level), seen - i);
        totals += weight;
        store(scores + i, weight);
    }
    for (; i < end; i += LANES) store(scores + i, fill(0.0f));
    return sum(totals);
}

static void attend_head(const attention *a, const segment *s, long head) {
    long stride = pad(a->longest, TILE) + TILE, e = a->value_width;
    for (long first = 0; first < s->length; first += BLOCK) {
        long count = s->length - first < BLOCK ? s->length - first : BLOCK, seen = s->past + first;
        long rows = take(&a->queries, s->start + first, head, a->width, count, a->scale, s->queries);
        long reach = seen + count;
        compute_scores(s->queries, a->width, rows, seen, s->packed_keys, s->scores, stride, reach);
        float totals[BLOCK];
        for (long r = 0; r < rows; r++) {
            float *scores = s->scores + r * stride;
            long own = r < count ? seen + r + 1 : 0;
            float level = own ? find_highest(scores, own) : 0.0f;
            totals[r] = weigh(scores, own, reach, level);
            if (r < count) a->levels[(s->start + first + r) * a->heads + head] = level + logf(totals[r]);
        }
        for (long r = 0; r < rows; r += ROWS) {
            long last = seen + r + ROWS < reach ? seen + r + ROWS : reach;
            multiply_wide(ROWS, e, s->scores + r * stride, stride, 1, s->values, last, s->outputs + r * e, 0);
        }
        for (long r = 0; r < count; r++) {
            float *out = a->outputs + ((s->start + first + r) * a->heads + head) * e;
            for (long i = 0; i < e; i++) out[i] = s->outputs[r * e + i] / totals[r];
        }
    }
}

static void differentiate_head(const attention *a, const segment *s, long head) {
    long stride = pad(a->longest, TILE) + TILE, d = a->width, e = a->value_width;
    states outputs = {a->outputs, a->heads * e, e};
    for (long first = 0; first < s->length; first += BLOCK) {
        long count = s->length - first < BLOCK ? s->length - first : BLOCK, seen = s->past + first;
        long token = s->start + first, reach = seen + count, end = pad(reach, ROWS);
        long rows = take(&a->queries, token, head, d, count, a->scale, s->queries);
        take(&a->gradient, token, head, e, count, 1.0f, s->gradient);
        take(&outputs, token, head, e, count, 1.0f, s->outputs);
        compute_scores(s->queries, d, rows, seen, s->packed_keys, s->scores, stride, reach);
        compute_scores(s->gradient, e, rows, seen, s->packed_values, s->score_gradient, stride, reach);
        for (long r = 0; r < rows; r++) {
            float *weights = s->scores + r * stride, *gradient = s->score_gradient + r * stride, delta = 0.0f;
            long own = r < count ? seen + r + 1 : 0, i = 0;
            weigh(weights, own, end, own ? a->levels[(token + r) * a->heads + head] : 0.0f);
            for (long j = 0; j < e; j++) delta += s->gradient[r * e + j] * s->outputs[r * e + j];
            /* Beyond `own` the gradient may never have been written: no number times 0 may be NaN. */
            for (; i < own; i += LANES)
                store(gradient + i, keep_first(load(weights + i) * (load(gradient + i) - delta), own - i));
            for (; i < end; i += LANES) store(gradient + i, fill(0.0f));
        }
        for (long key = 0; key < reach; key += ROWS) {
            /* The queries before the first one that sees a key of these have weights of 0. */
            long skipped = key > seen ? (key - seen < rows ? key - seen : rows) : 0;
            const float *weights = s->scores + skipped * stride + key;
            const float *gradient = s->score_gradient + skipped * stride + key;
            multiply_wide(ROWS, e, weights, 1, stride, s->gradient + skipped * e, rows - skipped,
                          s->value_gradient + key * e, 1);
            multiply_wide(ROWS, d, gradient, 1, stride, s->queries + skipped * d, rows - skipped,
                          s->key_gradient + key * d, 1);
        }
        for (long r = 0; r < rows; r += ROWS) {
            long last = seen + r + ROWS < reach ? seen + r + ROWS : reach;
            multiply_wide(ROWS, d, s->score_gradient + r * stride, stride, 1, s->keys, last, s->outputs + r * d, 0);
        }
        for (long r = 0; r < count; r++) {
            float *out = a->query_gradient + ((token + r) * a->heads + head) * d;
            for (long i = 0; i < d; i++) out[i] = a->scale * s->outputs[r * d + i];
        }
    }
}

static void attend_segments(team *t, void *argument, long thread) {
    work *w = argument;
    const attention *a = w->a;
    long repeats = a->heads / a->groups;
    (void)t;
    for (long number; (number = atomic_fetch_add(&w->next, 1)) < a->segments * a->groups;) {
        segment s = open_segment(a, number, a->room + thread * measure_thread_room(a));
        for (long head = s.group * repeats; head < (s.group + 1) * repeats; head++) attend_head(a, &s, head);
    }
}

static void differentiate_segments(team *t, void *argument, long thread) {
    work *w = argument;
    const attention *a = w->a;
    long repeats = a->heads / a->groups, d = a->width, e = a->value_width, from, to;
    long pasts = a->first_past[a->segments];
    for (long number; (number = atomic_fetch_add(&w->next, 1)) < a->segments * a->groups;) {
        segment s = open_segment(a, number, a->room + thread * measure_thread_room(a));
        pack(s.values, s.reach, e, s.packed_values);
        memset(s.key_gradient, 0, pad(s.reach, ROWS) * d * sizeof(float));
        memset(s.value_gradient, 0, pad(s.reach, ROWS) * e * sizeof(float));
        for (long head = s.group * repeats; head < (s.group + 1) * repeats; head++) differentiate_head(a, &s, head);
        float *past = a->past_gradient + (s.group * pasts + a->first_past[number % a->segments]) * (d + e);
        for (long key = 0; key < s.past; key++, past += d + e) {
            memcpy(past, s.key_gradient + key * d, d * sizeof(float));
            memcpy(past + d, s.value_gradient + key * e, e * sizeof(float));
        }
        for (long key = s.past; key < s.reach; key++) {
            long row = (s.start + key - s.past) * a->groups + s.group;
            memcpy(a->key_gradient + row * d, s.key_gradient + key * d, d * sizeof(float));
            memcpy(a->value_gradient + row * e, s.value_gradient + key * e, e * sizeof(float));
        }
    }
    meet(t);
    /* Each thread has some tokens, and adds to them what the segments below found, in their order. */
    share(a->tokens, t, thread, &from, &to);
    for (long number = 0; number < a->segments; number++) {
        long past = a->first_past[number];
        for (long span = a->first_span[number]; span + 1 < a->first_span[number + 1]; span++)
            for (long i = 0; i < a->spans[2 * span + 1]; i++, past++) {
                long token = a->spans[2 * span] + i;
                for (long group = 0; group < a->groups && token >= from && token < to; group++) {
                    const float *below = a->past_gradient + (group * pasts + past) * (d + e);
                    float *keys = a->key_gradient + (token * a->groups + group) * d;
                    float *values = a->value_gradient + (token * a->groups + group) * e;
                    for (long j = 0; j < d; j++) keys[j] += below[j];
                    for (long j = 0; j < e; j++) values[j] += below[d + j];
                }
            }
    }
}

/* The floats of `room` that so many threads need. */
long measure_attention_room(const attention *a, long threads) { return threads * measure_thread_room(a); }

/* Write the outputs and levels of all tokens. */
void attend_row(const attention *a, long threads) {
    work w = {a, 0};
    run(attend_segments, &w, threads);
}

/* Write the gradients of queries, keys and values from that of the outputs. */
void differentiate_row(const attention *a, long threads) {
    work w = {a, 0};
    run(differentiate_segments, &w, threads);
}
