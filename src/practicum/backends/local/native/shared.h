/* What the compiled programs share: vectors of LANES numbers, the exponential, and threads. */
#ifndef SHARED_H
#define SHARED_H
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define SPINS 4000

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4)));

/* Threads that do one piece of work together; phase 0: not all of them are started. */
typedef struct team {
    long threads;
    atomic_long arrived, phase;
    void (*work)(struct team *, void *, long thread);
    void *job;
} team;

typedef struct {
    team *t;
    long thread;
} worker;

static inline vector load(const float *p) { return *(const vector *)p; }
static inline void store(float *p, vector v) { *(vector *)p = v; }

static float sum(vector v) {
    float total = 0.0f;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

static float dot(const float *a, const float *b, long count) {
    vector sums = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES) sums += load(a + i) * load(b + i);
    float total = sum(sums);
    for (; i < count; i++) total += a[i] * b[i];
    return total;
}

static vector fill(float value) { return (vector){0} + value; }

static vector choose(integers mask, vector yes, vector no) {
    return (vector)((mask & (integers)yes) | (~mask & (integers)no));
}

/* The exponential, to 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. It is
   0 where the result would be smaller than a normal float. */
static vector exponentiate(vector x) {
    const vector low = fill(-87.3f), high = fill(88.3f), magic = fill(12582912.0f); /* 1.5 x 2^23 */
    integers vanishes = x < low; /* a comparison with NaN is false, so NaN stays NaN */
    x = choose(vanishes, low, x);
    x = choose(x > high, high, x);
    vector n = x * 1.44269504088896341f + magic; /* rounds to a whole number, which the low bits hold */
    integers whole = (integers)n - (integers)magic;
    n -= magic;
    vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return choose(vanishes, fill(0.0f), p * (vector)((whole + 127) << 23));
}

static float find_highest(const float *x, long count) {
    vector highest = fill(-INFINITY);
    long i = 0;
    for (; i + LANES <= count; i += LANES) highest = choose(load(x + i) > highest, load(x + i), highest);
    float result = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) result = highest[lane] > result ? highest[lane] : result;
    for (; i < count; i++) result = x[i] > result ? x[i] : result;
    return result;
}

/* Numbers from `at` on; those past the end are `rest`. */
static vector load_some(const float *x, long at, long count, float rest) {
    if (at + LANES <= count) return load(x + at);
    float some[LANES];
    for (long i = 0; i < LANES; i++) some[i] = at + i < count ? x[at + i] : rest;
    return load(some);
}

static void store_some(float *x, long at, long count, vector v) {
    if (at + LANES <= count) {
        store(x + at, v);
        return;
    }
    for (long i = 0; at + i < count; i++) x[at + i] = v[i];
}

/* Wait until the phase is another. Spin first: it is microseconds away if each thread has a core. */
static void wait_for_change(team *t, long phase) {
    for (long spins = 0; atomic_load(&t->phase) == phase; spins++)
        if (spins > SPINS) sched_yield();
}

/* Wait until every thread is here. */
static void meet(team *t) {
    if (t->threads == 1) return;
    long phase = atomic_load(&t->phase);
    if (atomic_fetch_add(&t->arrived, 1) == t->threads - 1) {
        atomic_store(&t->arrived, 0);
        atomic_store(&t->phase, phase + 1);
        return;
    }
    wait_for_change(t, phase);
}

static void *start(void *argument) {
    worker *w = argument;
    wait_for_change(w->t, 0);
    w->t->work(w->t, w->t->job, w->thread);
    return 0;
}

/* Do a piece of work with so many threads. One that cannot be started is done without. */
static void run(void (*work)(team *, void *, long), void *job, long threads) {
    team t = {.work = work, .job = job};
    pthread_t started[threads];
    worker workers[threads];
    long count = 0;
    while (++count < threads) {
        workers[count] = (worker){&t, count};
        if (pthread_create(&started[count], 0, start, &workers[count])) break;
    }
    t.threads = count;
    atomic_store(&t.phase, 1);
    work(&t, job, 0);
    for (long thread = 1; thread < count; thread++) pthread_join(started[thread], 0);
}

static void share(long count, const team *t, long thread, long *from, long *to) {
    *from = count * thread / t->threads;
    *to = count * (thread + 1) / t->threads;
}

#endif
