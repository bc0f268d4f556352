/* Reverse KL of whole distributions and its gradient, from the logits, row by row.

   A row of student and teacher stays in a core's caches while its numbers are computed, and nothing
   as large as the logits is stored: torch writes and reads such matrices about 25 times for it. */
#include "shared.h"

#define BLOCK (64 * LANES) /* numbers that are added in float32; sums of blocks are added in float64 */
#define LOWEST -1e4f       /* the log-probability of an impossible token, as in precision.py */
#define FLOOR -50.0f       /* the floor of the teacher's log-probabilities, as in divergences.py */

typedef struct {
    float *student;
    const float *teacher;
    long rows, columns;
    float *numbers; /* [7][rows]: both highest logits, both log-normalisers above them, reverse KL, both entropies */
    const float *coefficients;
} loss;

/* The greater one; NaN stays NaN. */
static vector raise(vector x, float least) { return choose(x < least, fill(least), x); }

static void measure_row(const loss *j, long row) {
    const float *student = j->student + row * j->columns, *teacher = j->teacher + row * j->columns;
    float teacher_highest = find_highest(teacher, j->columns);
    double total = 0.0, mean = 0.0, difference = 0.0;
    for (long first = 0; first < j->columns; first += BLOCK) {
        vector totals = {0}, means = {0};
        for (long i = first; i < first + BLOCK && i < j->columns; i += LANES) {
            vector x = raise(load_some(teacher, i, j->columns, -INFINITY) - teacher_highest, LOWEST);
            vector weight = exponentiate(x);
            totals += weight;
            means += weight * x;
        }
        total += sum(totals), mean += sum(means);
    }
    /* The highest logit is subtracted first: a level of both would round the digits of large logits away. */
    float teacher_level = log(total);
    j->numbers[j->rows + row] = teacher_highest;
    j->numbers[3 * j->rows + row] = teacher_level;
    j->numbers[6 * j->rows + row] = log(total) - mean / total;
    float highest = find_highest(student, j->columns);
    total = mean = 0.0;
    for (long first = 0; first < j->columns; first += BLOCK) {
        vector totals = {0}, means = {0}, differences = {0};
        for (long i = first; i < first + BLOCK && i < j->columns; i += LANES) {
            vector x = raise(load_some(student, i, j->columns, -INFINITY) - highest, LOWEST);
            vector y = raise(load_some(teacher, i, j->columns, 0.0f) - teacher_highest - teacher_level, FLOOR);
            vector weight = exponentiate(x);
            totals += weight;
            means += weight * x;
            differences += weight * (x - y);
        }
        total += sum(totals), mean += sum(means), difference += sum(differences);
    }
    j->numbers[row] = highest;
    j->numbers[2 * j->rows + row] = log(total);
    /* A token to which the student too gives less than the floor has no weight that float32 could add. */
    j->numbers[4 * j->rows + row] = difference / total - log(total);
    j->numbers[5 * j->rows + row] = log(total) - mean / total;
}

static void measure_rows(team *t, void *argument, long thread) {
    const loss *j = argument;
    long from, to;
    share(j->rows, t, thread, &from, &to);
    for (long row = from; row < to; row++) measure_row(j, row);
}

static void differentiate_rows(team *t, void *argument, long thread) {
    const loss *j = argument;
    long from, to;
    share(j->rows, t, thread, &from, &to);
    for (long row = from; row < to; row++) {
        float *student = j->student + row * j->columns;
        const float *teacher = j->teacher + row * j->columns;
        float highest = j->numbers[row], teacher_highest = j->numbers[j->rows + row];
        float level = j->numbers[2 * j->rows + row], teacher_level = j->numbers[3 * j->rows + row];
        float mean = j->numbers[4 * j->rows + row], coefficient = j->coefficients[row];
        for (long i = 0; i < j->columns; i += LANES) {
            vector x = raise(load_some(student, i, j->columns, 0.0f) - highest - level, LOWEST);
            vector y = raise(load_some(teacher, i, j->columns, 0.0f) - teacher_highest - teacher_level, FLOOR);
            store_some(student, i, j->columns, coefficient * exponentiate(x) * (x - y - mean));
        }
    }
}

/* Write the numbers of each row of logits. */
void measure_loss(float *student, const float *teacher, long rows, long columns, float *numbers, long threads) {
    loss j = {student, teacher, rows, columns, numbers, 0};
    run(measure_rows, &j, threads);
}

/* Write the gradient of the sum of coefficients times reverse KL over the student's logits. */
void differentiate_loss(float *student, const float *teacher, long rows, long columns, float *numbers,
                        const float *coefficients, long threads) {
    loss j = {student, teacher, rows, columns, numbers, coefficients};
    run(differentiate_rows, &j, threads);
}
