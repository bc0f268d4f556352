/* Some tokens of every text through the layers of a Llama-like model, without an operation a layer to dispatch.

   Compiled at first use with -DLANES=16 (AVX-512) or -DLANES=8 (AVX2); see library.py. All numbers
   are float32. A row's sums are added in an order that does not depend on the other rows or on the
   number of threads, so neither changes a bit of it.

   Weights are packed in panels of PANEL columns, [ceil(N / PANEL)][K][PANEL], padded with zeros:
   the innermost loop reads them in order and holds ROWS x PANEL sums in registers. */
#include "shared.h"

#define PANEL (3 * LANES)
#if LANES == 16
#define ROWS 8 /* 24 sums, 3 columns of weights: 32 registers */
#else
#define ROWS 4 /* 12 sums, 3 columns of weights: 16 registers */
#endif

typedef struct {
    const float *attention_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *out, *out_bias;
    const float *mlp_norm, *gate_up, *down;
} layer;

typedef struct {
    long layers, width, heads, groups, head_width, inner, slots, longest, captures;
    const int64_t *captured; /* [captures]: the numbers of layers after which states are kept */
    const layer *layer;
    const float *embedding, *final_norm, *cosines, *sines;
    float *keys, *values; /* [layers][slots][groups][longest][head_width] */
    float epsilon, scale;
} model;

/* Rows times one panel; `add` keeps what `out` holds. `columns` of the panel are real. */
#define KERNEL(R)                                                                                  \
    static void multiply_##R(const float *x, long stride, const float *w, long depth, float *out,  \
                             long out_stride, long columns, int add, const float *bias) {          \
        vector sums[R][3];                                                                         \
        for (int r = 0; r < R; r++)                                                                \
            for (int c = 0; c < 3; c++) sums[r][c] = (vector){0};                                  \
        for (long k = 0; k < depth; k++, w += PANEL) {                                             \
            __builtin_prefetch(w + 16 * PANEL);                                                    \
            __builtin_prefetch(w + 16 * PANEL + 16);                                               \
            if (LANES == 16) __builtin_prefetch(w + 16 * PANEL + 32);                              \
            vector first = load(w), second = load(w + LANES), third = load(w + 2 * LANES);         \
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                  \
                float value = x[r * stride + k];                                                   \
                sums[r][0] += value * first;                                                       \
                sums[r][1] += value * second;                                                      \
                sums[r][2] += value * third;                                                       \
            }                                                                                      \
        }                                                                                          \
        for (int r = 0; r < R; r++) {                                                              \
            float *to = out + r * out_stride, panel[PANEL];                                        \
            for (int c = 0; c < 3; c++) store(panel + c * LANES, sums[r][c]);                      \
            for (long i = 0; i < columns; i++)                                                     \
                to[i] = panel[i] + (add ? to[i] : 0.0f) + (bias ? bias[i] : 0.0f);                 \
        }                                                                                          \
    }
KERNEL(1) KERNEL(2) KERNEL(3) KERNEL(4)
#if ROWS == 8
KERNEL(5) KERNEL(6) KERNEL(7) KERNEL(8)
#endif

typedef void (*kernel)(const float *, long, const float *, long, float *, long, long, int, const float *);
static const kernel kernels[] = {
    0, multiply_1, multiply_2, multiply_3, multiply_4,
#if ROWS == 8
    multiply_5, multiply_6, multiply_7, multiply_8,
#endif
};

/* Panels `from` up to `to` of a product of `rows` rows with a packed weight of `columns` columns. */
static void multiply(const float *x, long rows, long stride, const float *w, long columns, long depth,
                     float *out, long out_stride, int add, const float *bias, long from, long to) {
    for (long panel = from; panel < to; panel++) {
        long at = panel * PANEL, real = columns - at < PANEL ? columns - at : PANEL;
        for (long row = 0; row < rows; row += ROWS) {
            long count = rows - row < ROWS ? rows - row : ROWS;
            kernels[count](x + row * stride, stride, w + panel * depth * PANEL, depth,
                           out + row * out_stride + at, out_stride, real, add, bias ? bias + at : 0);
        }
    }
}

static void add_scaled(float *out, const float *x, float scale, long count) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, load(out + i) + scale * load(x + i));
    for (; i < count; i++) out[i] += scale * x[i];
}

/* exp(sharpness * (x - shift)) of all numbers; `out` may be `x`. */
static void exponentiate_all(float *out, const float *x, long count, float shift, float sharpness) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, exponentiate((load(x + i) - shift) * sharpness));
    if (i < count) {
        float rest[LANES] = {0};
        memcpy(rest, x + i, (count - i) * sizeof(float));
        store(rest, exponentiate((load(rest) - shift) * sharpness));
        memcpy(out + i, rest, (count - i) * sizeof(float));
    }
}

static void normalize(const float *x, float *out, const float *weight, long width, float epsilon) {
    float scale = 1.0f / sqrtf(dot(x, x, width) / width + epsilon);
    for (long i = 0; i < width; i++) out[i] = weight[i] * (x[i] * scale);
}

static void rotate(float *x, const float *cosines, const float *sines, long half) {
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

/* silu(gate) * up, in place of gate. */
static void gate(float *gates, const float *ups, long count) {
    long i = 0;
    for (; i < count; i += LANES) {
        float g[LANES] = {0}, u[LANES] = {0};
        long real = count - i < LANES ? count - i : LANES;
        memcpy(g, gates + i, real * sizeof(float));
        memcpy(u, ups + i, real * sizeof(float));
        vector v = load(g);
        store(g, v / (1.0f + exponentiate(-v)) * load(u));
        memcpy(gates + i, g, real * sizeof(float));
    }
}

typedef struct {
    const model *m;
    long rows, branch;
    const int64_t *tokens, *slots, *lengths, *depths;
    const int64_t *branches; /* [rows][branch]: places after the text, the row's own at its depth */
    float *hidden, *lower, *states, *projected, *mixed, *normed, *scores;
} step;

/* Where the first place of a row's slot is in the keys and values of a layer. */
static long find_slot(const step *j, long index, long row, long group) {
    const model *m = j->m;
    return ((index * m->slots + j->slots[row]) * m->groups + group) * m->longest * m->head_width;
}

static void remember(const step *j, long index, long row, long group) {
    const model *m = j->m;
    long d = m->head_width, depth = j->depths[row], position = j->lengths[row] + depth;
    const layer *l = &m->layer[index];
    float *key = j->projected + (row * (m->heads + 2 * m->groups) + m->heads + group) * d;
    long place = find_slot(j, index, row, group) + (j->lengths[row] + j->branches[row * j->branch + depth]) * d;
    if (l->key_norm) normalize(key, key, l->key_norm, d, m->epsilon);
    rotate(key, m->cosines + position * (d / 2), m->sines + position * (d / 2), d / 2);
    memcpy(m->keys + place, key, d * sizeof(float));
    memcpy(m->values + place, key + m->groups * d, d * sizeof(float));
}

static void attend(const step *j, long index, long row, long group, float *scores) {
    const model *m = j->m;
    long d = m->head_width, repeats = m->heads / m->groups;
    long length = j->lengths[row], position = length + j->depths[row];
    const layer *l = &m->layer[index];
    float *projected = j->projected + row * (m->heads + 2 * m->groups) * d;
    const float *cosines = m->cosines + position * (d / 2), *sines = m->sines + position * (d / 2);
    long slot = find_slot(j, index, row, group);
    const float *keys = m->keys + slot, *values = m->values + slot;
    const int64_t *branch = j->branches + row * j->branch;
    for (long head = group * repeats; head < (group + 1) * repeats; head++) {
        float *query = projected + head * d, *out = j->mixed + (row * m->heads + head) * d;
        if (l->query_norm) normalize(query, query, l->query_norm, d, m->epsilon);
        rotate(query, cosines, sines, d / 2);
        float highest = -INFINITY, total = 0.0f;
        for (long at = 0; at <= position; at++) {
            const float *key = keys + (at < length ? at : length + branch[at - length]) * d;
            scores[at] = dot(query, key, d) * m->scale;
            highest = scores[at] > highest ? scores[at] : highest;
        }
        exponentiate_all(scores, scores, position + 1, highest, 1.0f);
        memset(out, 0, d * sizeof(float));
        for (long at = 0; at <= position; at++) {
            const float *value = values + (at < length ? at : length + branch[at - length]) * d;
            total += scores[at];
            add_scaled(out, value, scores[at], d);
        }
        for (long i = 0; i < d; i++) out[i] /= total;
    }
}

static void read_tokens(team *t, void *argument, long thread) {
    step *j = argument;
    const model *m = j->m;
    long rows = j->rows, width = m->width, d = m->head_width;
    long attended = m->heads * d, qkv = attended + 2 * m->groups * d, inner = m->inner, from, to;
    long width_panels = (width + PANEL - 1) / PANEL, qkv_panels = (qkv + PANEL - 1) / PANEL;
    long inner_panels = (inner + PANEL - 1) / PANEL;
    float *normed = j->normed + thread * rows * width, *scores = j->scores + thread * m->longest;
    share(rows, t, thread, &from, &to);
    for (long row = from; row < to; row++)
        memcpy(j->states + row * width, m->embedding + j->tokens[row] * width, width * sizeof(float));
    meet(t);
    for (long index = 0; index < m->layers; index++) {
        const layer *l = &m->layer[index];
        /* Every thread normalizes all rows for itself: that is faster than to wait for another. */
        for (long row = 0; row < rows; row++)
            normalize(j->states + row * width, normed + row * width, l->attention_norm, width, m->epsilon);
        share(qkv_panels, t, thread, &from, &to);
        multiply(normed, rows, width, l->qkv, qkv, width, j->projected, qkv, 0, l->qkv_bias, from, to);
        meet(t);
        share(rows * m->groups, t, thread, &from, &to);
        for (long pair = from; pair < to; pair++) remember(j, index, pair / m->groups, pair % m->groups);
        /* Rows of one text read each other's keys. */
        if (j->branch > 1) meet(t);
        for (long pair = from; pair < to; pair++) attend(j, index, pair / m->groups, pair % m->groups, scores);
        meet(t);
        share(width_panels, t, thread, &from, &to);
        multiply(j->mixed, rows, attended, l->out, width, attended, j->states, width, 1, l->out_bias, from, to);
        meet(t);
        for (long row = 0; row < rows; row++)
            normalize(j->states + row * width, normed + row * width, l->mlp_norm, width, m->epsilon);
        /* Gates and ups are packed apart, so that a thread has both of the columns that it joins. */
        const float *ups = l->gate_up + inner_panels * width * PANEL;
        share(inner_panels, t, thread, &from, &to);
        multiply(normed, rows, width, l->gate_up, inner, width, j->projected, 2 * inner, 0, 0, from, to);
        multiply(normed, rows, width, ups, inner, width, j->projected + inner, 2 * inner, 0, 0, from, to);
        long first = from * PANEL, last = to * PANEL < inner ? to * PANEL : inner;
        for (long row = 0; row < rows; row++) {
            float *gates = j->projected + row * 2 * inner + first;
            if (last > first) gate(gates, gates + inner, last - first);
        }
        meet(t);
        share(width_panels, t, thread, &from, &to);
        multiply(j->projected, rows, 2 * inner, l->down, width, inner, j->states, width, 1, 0, from, to);
        meet(t);
        /* No thread changes the states before the next layer's second meeting. */
        share(rows, t, thread, &from, &to);
        for (long k = 0; k < m->captures; k++) {
            if (m->captured[k] != index + 1) continue;
            for (long row = from; row < to; row++)
                memcpy(j->lower + (row * m->captures + k) * width, j->states + row * width, width * sizeof(float));
        }
    }
    share(rows, t, thread, &from, &to);
    for (long row = from; row < to; row++)
        normalize(j->states + row * width, j->hidden + row * width, m->final_norm, width, m->epsilon);
}

static long widest(const model *m) {
    long qkv = (m->heads + 2 * m->groups) * m->head_width;
    return qkv > 2 * m->inner ? qkv : 2 * m->inner;
}

/* The floats of `room` that `advance` needs for so many rows and threads. */
long measure_room(const model *m, long rows, long threads) {
    return rows * (m->width * (1 + threads) + widest(m) + m->heads * m->head_width) + threads * m->longest;
}

/* Read one token a row, `depths` places after a text of `lengths` tokens; `hidden` [rows][width] predicts the
   next ones. A row attends to the text, to the rows of its branch before it, and to itself. `lower`
   [rows][captures][width] are the states after the captured layers. */
void advance(const model *m, long rows, long branch, const int64_t *tokens, const int64_t *slots,
             const int64_t *lengths, const int64_t *depths, const int64_t *branches, float *hidden,
             float *lower, float *room, long threads) {
    step j = {m, rows, branch, tokens, slots, lengths, depths, branches, hidden, lower};
    j.states = room;
    j.projected = j.states + rows * m->width;
    j.mixed = j.projected + rows * widest(m);
    j.normed = j.mixed + rows * m->heads * m->head_width;
    j.scores = j.normed + threads * rows * m->width;
    run(read_tokens, &j, threads);
}

typedef struct {
    const float *x, *weight;
    long rows, columns, depth;
    float *out;
} product;

static void multiply_rows(team *t, void *argument, long thread) {
    product *p = argument;
    long from, to;
    share((p->columns + PANEL - 1) / PANEL, t, thread, &from, &to);
    multiply(p->x, p->rows, p->depth, p->weight, p->columns, p->depth, p->out, p->columns, 0, 0, from, to);
}

/* `out` [rows][columns]: rows times a packed weight. */
void project(const float *x, long rows, const float *weight, long columns, long depth, float *out, long threads) {
    product p = {x, weight, rows, columns, depth, out};
    run(multiply_rows, &p, threads);
}

typedef struct {
    const float *logits;
    long rows, vocabulary, block;
    const double *noise; /* [rows][blocks + block] */
    float sharpness;     /* 1 / temperature */
    float *room;         /* [threads][vocabulary] */
    int64_t *tokens;
    float *logprobs, *policy_logprobs;
} race;

static float add_all(const float *x, long count) {
    vector sums = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES) sums += load(x + i);
    float total = sum(sums);
    for (; i < count; i++) total += x[i];
    return total;
}

/* The race of drawing.py: blocks arrive after exponential times with their masses as rates, then the
   tokens of the first block do. A rate of 0 never arrives. */
static void draw_rows(team *t, void *argument, long thread) {
    race *j = argument;
    long from, to, blocks = (j->vocabulary + j->block - 1) / j->block;
    share(j->rows, t, thread, &from, &to);
    float *weights = j->room + thread * j->vocabulary;
    for (long row = from; row < to; row++) {
        const float *logits = j->logits + row * j->vocabulary;
        const double *noise = j->noise + row * (blocks + j->block);
        float highest = find_highest(logits, j->vocabulary);
        exponentiate_all(weights, logits, j->vocabulary, highest, j->sharpness);
        double earliest = INFINITY, total = 0.0;
        long winner = 0, token = 0;
        for (long block = 0; block < blocks; block++) {
            long first = block * j->block, left = j->vocabulary - first;
            double mass = add_all(weights + first, left < j->block ? left : j->block);
            total += mass;
            double time = mass > 0.0 ? noise[block] / mass : INFINITY;
            if (time < earliest) earliest = time, winner = block;
        }
        earliest = INFINITY;
        for (long i = 0; i < j->block && winner * j->block + i < j->vocabulary; i++) {
            double weight = weights[winner * j->block + i];
            double time = weight > 0.0 ? noise[blocks + i] / weight : INFINITY;
            if (time < earliest) earliest = time, token = i;
        }
        token += winner * j->block;
        j->tokens[row] = token;
        j->logprobs[row] = log(weights[token] / total);
        if (j->sharpness == 1.0f) {
            j->policy_logprobs[row] = j->logprobs[row];
            continue;
        }
        exponentiate_all(weights, logits, j->vocabulary, highest, 1.0f);
        total = 0.0;
        for (long first = 0; first < j->vocabulary; first += j->block)
            total += add_all(weights + first, j->vocabulary - first < j->block ? j->vocabulary - first : j->block);
        j->policy_logprobs[row] = logits[token] - highest - log(total);
    }
}

/* Sample a token of each row from the softmax of its logits times `sharpness`. */
void draw(const float *logits, long rows, long vocabulary, long block, const double *noise, float sharpness,
          float *room, int64_t *tokens, float *logprobs, float *policy_logprobs, long threads) {
    race j = {logits, rows, vocabulary, block, noise, sharpness, room, tokens, logprobs, policy_logprobs};
    run(draw_rows, &j, threads);
}
