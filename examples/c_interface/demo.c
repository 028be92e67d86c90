/* What an engine in C does with a layer's cache: a prompt, a sample of it, and steps that are certified. Each setting
 * is checked against dense attention in double; the exit code is 0 when all of them kept their promise. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "verkv_c.h"

enum {
    query_heads = 6,
    kv_heads = 2,
    group = query_heads / kv_heads,
    dim = 64, /* of keys and values */
    prompt = 2048,
    steps = 12,
    tokens = prompt + steps + 4,
    stride = 16, /* between the prompt's queries that are kept */
    kept_queries = prompt / stride,
    chunk = 500 /* tokens of the prompt that are processed at once */
};

static const double epsilon = 0.05, delta = 0.1;

/* ---- A text: [token][KV head][channel] and [query][query head][channel]. ---- */

static uint16_t keys[tokens * kv_heads * dim], values[tokens * kv_heads * dim]; /* IEEE half, as bits */
static float prompt_queries[kept_queries * query_heads * dim];                  /* at positions 15, 31, ..., 2047 */
static float queries[tokens - prompt][query_heads * dim];                       /* of the tokens behind the prompt */
static int64_t positions[tokens], query_positions[kept_queries];

static uint64_t state = 1;

static double uniform(void) { /* splitmix64 */
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}

static double normal(void) {
    const double radius = sqrt(-2 * log(1 - uniform()));
    return radius * cos(6.283185307179586 * uniform());
}

/* To half and back, for numbers as small as ours: 2^-14 to 65504, ties away from zero; what is smaller becomes 0. */
static uint16_t half_of(double x) {
    int exponent;
    const double fraction = frexp(fabs(x), &exponent); /* in [1/2, 1) */
    const uint32_t sign = x < 0 ? 0x8000u : 0;
    if (exponent < -13) {
        return (uint16_t)sign;
    }
    return (uint16_t)(sign + ((uint32_t)(exponent + 13) << 10) + (uint32_t)(fraction * 2048 + 0.5));
}

static double from_half(uint16_t bits) {
    const int exponent = (bits >> 10) & 31;
    const double magnitude = exponent == 0 ? 0 : ldexp(1024 + (bits & 1023), exponent - 25);
    return bits & 0x8000u ? -magnitude : magnitude;
}

/* RoPE pairs (c, c + dim/2) with c < 4 carry most of a key. */
static double deviation(int channel) {
    return channel % (dim / 2) < 4 ? 2.5 : 0.7;
}

/* A query of the heavy channels, half of it the head's own direction, half new; its logits deviate by 3. */
static void make_query(float* query, const double* direction) {
    double row[dim], variance = 0;
    for (int c = 0; c < dim; ++c) {
        row[c] = (0.7 * direction[c] + 0.7 * normal()) * deviation(c);
        variance += row[c] * row[c] * deviation(c) * deviation(c);
    }
    for (int c = 0; c < dim; ++c) {
        query[c] = (float)(row[c] * 3 * sqrt(dim / variance));
    }
}

static void make_text(void) {
    double direction[query_heads][dim];
    for (int h = 0; h < query_heads; ++h) {
        for (int c = 0; c < dim; ++c) {
            direction[h][c] = normal();
        }
    }
    for (int i = 0; i < tokens * kv_heads * dim; ++i) {
        keys[i] = half_of(normal() * deviation(i % dim));
        values[i] = half_of(1 + normal());
    }
    for (int t = 0; t < tokens; ++t) {
        positions[t] = t;
        for (int h = 0; h < query_heads && t >= prompt; ++h) {
            make_query(queries[t - prompt] + h * dim, direction[h]);
        }
    }
    for (int i = 0; i < kept_queries; ++i) {
        query_positions[i] = (i + 1) * stride - 1;
        for (int h = 0; h < query_heads; ++h) {
            make_query(prompt_queries + (i * query_heads + h) * dim, direction[h]);
        }
    }
}

/* ---- Dense attention, in double. ---- */

/* Of one query head over the first n tokens: output [dim]; returns ln of the sum of e^logit. */
static double dense(const float* query, int kv_head, int n, double* output) {
    static double logit[tokens];
    double largest = -HUGE_VAL, sum = 0;
    for (int t = 0; t < n; ++t) {
        const uint16_t* key = keys + (t * kv_heads + kv_head) * dim;
        double dot = 0;
        for (int c = 0; c < dim; ++c) {
            dot += from_half(key[c]) * (double)query[c];
        }
        logit[t] = dot / sqrt(dim);
        largest = logit[t] > largest ? logit[t] : largest;
    }
    memset(output, 0, dim * sizeof(*output));
    for (int t = 0; t < n; ++t) {
        const uint16_t* value = values + (t * kv_heads + kv_head) * dim;
        const double weight = exp(logit[t] - largest);
        sum += weight;
        for (int c = 0; c < dim; ++c) {
            output[c] += weight * from_half(value[c]);
        }
    }
    for (int c = 0; c < dim; ++c) {
        output[c] /= sum;
    }
    return largest + log(sum);
}

/* How far a step of all query heads over n tokens is off: the error of the denominator and of the output, relative. */
struct error {
    double denominator[query_heads], output[query_heads];
};

static struct error error_of(const float* query, int n, const float* output, const float* lse) {
    struct error e;
    for (int h = 0; h < query_heads; ++h) {
        double exact[dim], difference = 0, norm = 0;
        const double exact_lse = dense(query + h * dim, h / group, n, exact);
        for (int c = 0; c < dim; ++c) {
            const double d = (double)output[h * dim + c] - exact[c];
            difference += d * d;
            norm += exact[c] * exact[c];
        }
        e.denominator[h] = fabs(expm1((double)lse[h] - exact_lse));
        e.output[h] = sqrt(difference / norm);
    }
    return e;
}

/* ---- verkv. ---- */

static void must(verkv_status status, const char* what) {
    if (status != VERKV_OK) {
        fprintf(stderr, "%s failed with status %d: %s\n", what, (int)status, verkv_last_error());
        exit(1);
    }
}

static void append(verkv_cache* cache, verkv_request request, int first, int count) {
    const size_t at = (size_t)first * kv_heads * dim;
    must(verkv_append(cache, request, keys + at, values + at, positions + first, (size_t)count), "append");
}

static double larger(double a, double b) {
    return a > b ? a : b;
}

/* One setting from the prompt to the last step. Returns how many things went wrong. */
static int run(const char* name, const verkv_options* options) {
    verkv_cache* cache;
    verkv_request request;
    float output[query_heads * dim], lse[query_heads];
    double fetched = 0, resident = 0, certified = 0, worst = 0, worst_output = 0, decisions = 0;
    int broken = 0, wrong = 0;

    must(verkv_create(options, &cache), "create");
    must(verkv_open(cache, /*seed=*/1, &request), "open");
    for (int first = 0; first < prompt; first += chunk) {
        const int count = prompt - first < chunk ? prompt - first : chunk;
        const size_t at = (size_t)first * kv_heads * dim;
        must(verkv_prefill(cache, request, keys + at, values + at, positions + first, (size_t)count), "prefill");
    }
    must(verkv_compress(cache, request, prompt_queries, query_positions, kept_queries, stride), "compress");

    for (int s = 0; s < steps; ++s) {
        const int token = prompt + s;
        const verkv_step_item item = {request, queries[s], output, lse};
        append(cache, request, token, 1);
        if (s == steps / 2) {
            /* Three tokens of a draft, and the draft is rejected. */
            append(cache, request, token + 1, 3);
            must(verkv_step(cache, &item, 1, epsilon, delta), "step");
            must(verkv_truncate(cache, request, token + 1), "truncate");
        }
        must(verkv_step(cache, &item, 1, epsilon, delta), "step");
        const struct error e = error_of(queries[s], token + 1, output, lse);
        for (int h = 0; h < query_heads; ++h) {
            const double promised = options->target == VERKV_TARGET_OUTPUT ? e.output[h] : e.denominator[h];
            worst = larger(worst, promised);
            worst_output = larger(worst_output, e.output[h]);
            broken += !(promised <= epsilon);
            decisions += 1;
        }
        for (uint32_t h = 0; h < kv_heads; ++h) {
            verkv_head_report r;
            must(verkv_report(cache, 0, h, &r), "report");
            fetched += (double)r.rows_fetched / (double)r.tokens / (kv_heads * steps);
            resident += (double)r.rows_resident / (double)r.tokens / (kv_heads * steps);
            certified = larger(certified, r.certificate_observed > 0 ? r.certificate_observed : r.certificate_after);
            wrong += r.tokens != (size_t)token + 1;
        }
    }
    printf("%-44s %8.2f %8.1f %8.1f %10.4f %10.4f %7d of %.0f %10.4f\n", name, verkv_sketch_bytes_per_token(cache),
           100 * resident, 100 * fetched, certified, worst, broken, decisions, worst_output);

    if (options->plan == VERKV_PLAN_NEVER) {
        wrong += fetched != 0 || !(certified > epsilon);
    } else {
        wrong += broken > delta * decisions; /* a promise about probabilities: a few may break it */
        wrong += !(certified < epsilon) || !(worst < 4 * epsilon);
        /* No error is left where next to none is allowed: everything is fetched. */
        const verkv_step_item item = {request, queries[steps - 1], output, lse};
        must(verkv_step(cache, &item, 1, 1e-9, delta), "step");
        const struct error e = error_of(queries[steps - 1], prompt + steps, output, lse);
        for (int h = 0; h < query_heads; ++h) {
            wrong += !(e.denominator[h] < 1e-5) || !(e.output[h] < 1e-5);
        }
    }
    must(verkv_release(cache, request), "release");
    verkv_destroy(cache);
    if (wrong) {
        printf("    WRONG: %d things\n", wrong);
    }
    return wrong;
}

/* What is refused comes back as a status and a message, and changes nothing. */
static int refuse(const verkv_options* options) {
    verkv_cache* cache;
    verkv_request request, second;
    float output[query_heads * dim];
    int wrong = 0;
    must(verkv_create(options, &cache), "create");
    must(verkv_open(cache, 1, &request), "open");
    wrong += verkv_open(cache, 2, &second) != VERKV_OUT_OF_CAPACITY;
    printf("\nA second request:     %s\n", verkv_last_error());
    must(verkv_prefill(cache, request, keys, values, positions, 100), "prefill");
    const verkv_step_item item = {request, queries[0], output, NULL};
    wrong += verkv_step(cache, &item, 1, epsilon, delta) != VERKV_INVALID_STATE;
    printf("A step too early:     %s\n", verkv_last_error());
    wrong += verkv_prefill(cache, request, keys, NULL, positions + 100, 1) != VERKV_INVALID_ARGUMENT;
    printf("A prompt of no value: %s\n", verkv_last_error());
    verkv_destroy(cache);
    return wrong;
}

int main(void) {
    int wrong = 0;
    verkv_options base;
    make_text();
    verkv_default_options(&base);
    base.query_heads = query_heads;
    base.kv_heads = kv_heads;
    base.key_dim = base.value_dim = dim;
    base.max_tokens = tokens;
    base.resident_rows = kv_heads * 600; /* an eighth of the prompt, new tokens, and chance */
    base.kept = 1.0 / 8;
    base.rope = VERKV_ROPE_HALF;

    printf("%d tokens of random text, epsilon = %g, delta = %g; errors are relative, of what is certified\n\n", prompt,
           epsilon, delta);
    printf("%-44s %8s %8s %8s %10s %10s %13s %10s\n", "", "sketch,", "% of all", "% of all", "largest", "largest", "",
           "largest");
    printf("%-44s %8s %8s %8s %10s %10s %13s %10s\n", "", "B/token", "resident", "fetched", "certified", "error",
           "broken", "of outputs");
    wrong += run("the defaults: 2-bit RoPE pairs, checked", &base);

    verkv_options o = base;
    o.target = VERKV_TARGET_OUTPUT;
    wrong += run("the output certified", &o);

    o = base;
    o.sketch = VERKV_SKETCH_ROTATED;
    o.sketch_bits = 4;
    o.carry_bounds = 1;
    o.threads = 2;
    wrong += run("4-bit rotated, its bounds carried; 2 threads", &o);

    o = base;
    o.sketch = VERKV_SKETCH_EXACT;
    wrong += run("exact logits", &o);
    o.plan = VERKV_PLAN_GREEDY;
    wrong += run("exact logits, the paper's plan", &o);
    o.plan = VERKV_PLAN_NEVER;
    wrong += run("exact logits, nothing fetched", &o);

    wrong += refuse(&base);
    return wrong ? 1 : 0;
}
