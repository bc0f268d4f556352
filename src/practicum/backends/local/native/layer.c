/* The work of a layer between its products, row by row: its norms, the rotation of heads, its gate; and their gradients. */
#include "shared.h"

typedef struct {
    long rows, width;
    const float *x, *weight, *gradient;
    float *out, *scales, *weight_gradient; /* [rows][width], [rows], [width] or null */
    float epsilon;
} norm;

typedef struct {
    long count;
    const float *gates, *ups, *gradient;
    float *out, *gate_gradient, *up_gradient;
} gating;

typedef struct {
    long tokens, heads, width;
    const float *x, *cosines, *sines; /* [tokens][heads][width], [tokens][width] */
    float *out, direction; /* -1: back */
} rotation;

static void normalize_some(team *t, void *argument, long thread) {
    const norm *n = argument;
    long from, to, width = n->width;
    share(n->rows, t, thread, &from, &to);
    for (long row = from; row < to; row++) {
        const float *x = n->x + row * width;
        float *out = n->out + row * width, scale = 1.0f / sqrtf(dot(x, x, width) / width + n->epsilon);
        n->scales[row] = scale;
        for (long i = 0; i < width; i++) out[i] = n->weight[i] * (x[i] * scale);
    }
}

static void differentiate_some_norms(team *t, void *argument, long thread) {
    const norm *n = argument;
    long from, to, width = n->width;
    share(n->rows, t, thread, &from, &to);
    for (long row = from; row < to; row++) {
        const float *x = n->x + row * width, *gradient = n->gradient + row * width;
        float *out = n->out + row * width, scale = n->scales[row];
        for (long i = 0; i < width; i++) out[i] = n->weight[i] * gradient[i];
        float mean = dot(out, x, width) * scale * scale / width;
        for (long i = 0; i < width; i++) out[i] = scale * (out[i] - mean * x[i]);
    }
    if (!n->weight_gradient) return;
    /* Each thread adds some columns over all rows, so that the sums do not depend on how many there are. */
    share(width, t, thread, &from, &to);
    memset(n->weight_gradient + from, 0, (to - from) * sizeof(float));
    for (long row = 0; row < n->rows; row++)
        for (long i = from; i < to; i++)
            n->weight_gradient[i] += n->gradient[row * width + i] * (n->x[row * width + i] * n->scales[row]);
}

/* The vectors of a share, of numbers whose count need not be a multiple of one. */
#define FOR_EACH_VECTOR(count)                                                                                   \
    long from, to;                                                                                               \
    share(((count) + LANES - 1) / LANES, t, thread, &from, &to);                                                 \
    for (long i = from * LANES, end = (count); i < to * LANES; i += LANES)

static void gate_some(team *t, void *argument, long thread) {
    const gating *g = argument;
    FOR_EACH_VECTOR(g->count) {
        vector gate = load_some(g->gates, i, end, 0.0f), up = load_some(g->ups, i, end, 0.0f);
        store_some(g->out, i, end, gate / (1.0f + exponentiate(-gate)) * up);
    }
}

static void differentiate_some_gates(team *t, void *argument, long thread) {
    const gating *g = argument;
    FOR_EACH_VECTOR(g->count) {
        vector gate = load_some(g->gates, i, end, 0.0f), up = load_some(g->ups, i, end, 0.0f);
        vector gradient = load_some(g->gradient, i, end, 0.0f), sigmoid = 1.0f / (1.0f + exponentiate(-gate));
        store_some(g->gate_gradient, i, end, gradient * up * sigmoid * (1.0f + gate * (1.0f - sigmoid)));
        store_some(g->up_gradient, i, end, gradient * gate * sigmoid);
    }
}

static void rotate_some(team *t, void *argument, long thread) {
    const rotation *r = argument;
    long from, to, half = r->width / 2;
    share(r->tokens, t, thread, &from, &to);
    for (long row = from * r->heads; row < to * r->heads; row++) {
        const float *x = r->x + row * r->width, *cosines = r->cosines + row / r->heads * r->width;
        const float *sines = r->sines + row / r->heads * r->width;
        float *out = r->out + row * r->width;
        for (long i = 0; i < half; i++) {
            float sine = r->direction * sines[i];
            out[i] = x[i] * cosines[i] - x[i + half] * sine;
            out[i + half] = x[i + half] * cosines[i] + x[i] * sine;
        }
    }
}

/* Write `out` and `scales`. */
void normalize_rows(const float *x, const float *weight, float *out, float *scales, long rows, long width,
                    float epsilon, long threads) {
    norm n = {rows, width, x, weight, 0, out, scales, 0, epsilon};
    run(normalize_some, &n, threads);
}

/* Write the gradients of the states and, unless it is null, of the weight. */
void differentiate_norms(const float *x, const float *weight, const float *gradient, float *scales, float *out,
                         float *weight_gradient, long rows, long width, long threads) {
    norm n = {rows, width, x, weight, gradient, out, scales, weight_gradient, 0.0f};
    run(differentiate_some_norms, &n, threads);
}

/* out = silu(gates) * ups. */
void gate_numbers(const float *gates, const float *ups, float *out, long count, long threads) {
    gating g = {count, gates, ups, 0, out, 0, 0};
    run(gate_some, &g, threads);
}

void differentiate_gates(const float *gates, const float *ups, const float *gradient, float *gate_gradient,
                         float *up_gradient, long count, long threads) {
    gating g = {count, gates, ups, gradient, 0, gate_gradient, up_gradient};
    run(differentiate_some_gates, &g, threads);
}

/* Turn the halves of each head by its token's angles times `direction`. */
void rotate_heads(const float *x, const float *cosines, const float *sines, float *out, long tokens, long heads,
                  long width, float direction, long threads) {
    rotation r = {tokens, heads, width, x, cosines, sines, out, direction};
    run(rotate_some, &r, threads);
}
