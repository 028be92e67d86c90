/* verkv for engines in C, or in C++ before C++20: the cache of one layer behind an opaque pointer. Needs C99.
 * Behind it is one object, from verkv_c.cpp: C++20, optimised, for the machine that it runs on (-O3 -march=native).
 *
 * A request goes: open, prefill (in any chunks), compress, then for each token append and step; compress again whenever
 * its tail has grown long, truncate or remove to go back; release. A request that was never prefilled needs no
 * compress.
 *
 * Every function that can fail returns a status, and verkv_last_error() then says why, with the numbers. A call that
 * fails has changed nothing of what the cache holds (a step that fails may have written outputs). Null pointers are
 * refused where they are needed; memory that is shorter than the sizes say cannot be noticed. No exception leaves.
 *
 * Rows are IEEE binary16 as bits, keys and queries after RoPE. Arrays are dense, the last index running fastest.
 * A cache is used by one thread at a time; different caches by different threads as they like. Results are the same
 * bits for any number of threads, any chunking of the prompt and any other requests of a step. */
#ifndef VERKV_C_H
#define VERKV_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The cache of one layer. */
typedef struct verkv_cache verkv_cache;

/* A request of a cache. Once it is released it is never valid again, whatever takes its slot. */
typedef struct {
    uint32_t slot, generation;
} verkv_request;

typedef enum {
    VERKV_OK = 0,
    VERKV_INVALID_ARGUMENT, /* null, out of range, of the wrong shape, or a request that is not open */
    VERKV_OUT_OF_CAPACITY,  /* the cache has fewer requests, tokens or rows left, or the system fewer threads */
    VERKV_INVALID_STATE,    /* right in itself, at the wrong time: prefilled tokens wait for compress, say */
    VERKV_OUT_OF_MEMORY,    /* the system has no memory for it */
    VERKV_INTERNAL          /* anything else: a fault of the library's */
} verkv_status;

/* What estimates the weights of tokens that are not resident. */
typedef enum {
    VERKV_SKETCH_EXACT,      /* a copy of all keys: exact weights; for comparison, and for layers where keys may stay */
    VERKV_SKETCH_ROPE_PAIRS, /* a few bits of the RoPE pairs with the most energy: the paper's */
    VERKV_SKETCH_ROTATED     /* a few bits of every channel after a random rotation; it bounds its own error */
} verkv_sketch;

/* What chooses the rows to fetch. */
typedef enum {
    VERKV_PLAN_WATER_FILLING, /* fewest rows; the only one that is checked from the sample, see check_rounds */
    VERKV_PLAN_GREEDY,        /* the paper's */
    VERKV_PLAN_NEVER          /* none: the certificate tells what the sample is worth, and epsilon is not kept */
} verkv_plan;

/* What is certified for each query head. */
typedef enum {
    VERKV_TARGET_DENOMINATOR, /* the softmax denominator, relative to the exact one */
    VERKV_TARGET_OUTPUT       /* the attention output, relative to value_scale, or to its norm: the latter is guessed
                               * and needs the check, which WATER_FILLING alone takes: with GREEDY nothing
                               * looks again at what was guessed, and its certificates promise nothing */
} verkv_target;

/* Which channels of a key RoPE rotates together. */
typedef enum {
    VERKV_ROPE_HALF,       /* i and i + key_dim/2 (GPT-NeoX; Llama as Hugging Face stores it) */
    VERKV_ROPE_INTERLEAVED /* 2i and 2i + 1 (GPT-J; Llama as Meta and llama.cpp store it) */
} verkv_rope;

/* What a cache is built with. Take verkv_default_options(), then set the sizes: they have no default.
 * A row is the key and the value of one token for one KV head. */
typedef struct {
    size_t struct_size; /* set by verkv_default_options(): a header that is not the library's is refused by it */

    uint32_t query_heads, kv_heads; /* of the layer; query head h reads KV head h / (query_heads / kv_heads) */
    uint32_t key_dim, value_dim;    /* channels */
    float logit_scale;              /* factor on <q, k>; 0: 1/sqrt(key_dim) */
    uint32_t layer;                 /* its number: layers of different numbers draw independently */
    size_t max_requests;            /* open at once [1] */
    size_t max_tokens;              /* of one request */
    size_t host_rows;               /* every token has one a KV head; 0: max_requests * max_tokens * kv_heads */
    /* In fast memory, of all KV heads of all requests: what compress keeps, and every token appended since. The number
     * kept is random: a few times its square root to spare a KV head suffice. */
    size_t resident_rows;
    size_t staging_rows; /* for fetched rows, a KV head and request, at least 64; 0: max_tokens / 16, at least 256 */

    verkv_sketch sketch;  /* [ROPE_PAIRS] */
    uint32_t sketch_bits; /* a channel: ROPE_PAIRS 1 to 8, ROTATED 1 to 4; EXACT ignores it [2] */
    float sketch_share;   /* of the channel pairs, (0, 1]; for ROPE_PAIRS [0.5] */
    verkv_rope rope;      /* for ROPE_PAIRS [HALF] */
    int carry_bounds;     /* 1: plans use the bounds of ROTATED, and the promise is a theorem; not for ROPE_PAIRS [0] */
    uint32_t shortlist;   /* tokens of a query head whose keys are read to weigh them exactly; not for EXACT [128] */
    verkv_plan plan;      /* [WATER_FILLING] */
    int joint;            /* 1: the query heads of a KV head plan together; for WATER_FILLING [1] */
    verkv_target target;  /* [DENOMINATOR] */
    double value_scale;   /* OUTPUT's errors relative to it, a theorem as the denominator's; 0: to the output's norm */
    uint32_t check_rounds; /* fetches that a check from the sample may add, 0 to 15; for WATER_FILLING where no theorem
                            * covers the plan. 0: no check, and with an approximate sketch the promise breaks [15] */
    double kept;           /* share of the tokens that compress expects to keep resident, (0, 1] [1/16] */
    size_t kept_at_least;  /* but so many of them [256] */
    size_t sink, local;    /* first and last tokens that are kept for certain, counted in kept [64, 64] */
    uint32_t threads;      /* that work on a call, the caller's included; caches of the same number share them (a call
                            * that finds them busy works alone). 1: the caller's alone; 0: the machine's number [1] */
} verkv_options;

/* Fills in the defaults, above in brackets; sizes that have none become 0. Null: nothing. */
void verkv_default_options(verkv_options* options);

/* Why the last call that failed on this thread did so; "" if none has. Valid until the next call that fails. */
const char* verkv_last_error(void);

/* Builds a cache and takes all the memory that a step will need; *cache is null where it fails.
 * INVALID_ARGUMENT for options out of range, OUT_OF_MEMORY, OUT_OF_CAPACITY for threads that do not start. */
verkv_status verkv_create(const verkv_options* options, verkv_cache** cache);

/* Ends a cache with all its requests. Null: nothing. */
void verkv_destroy(verkv_cache* cache);

/* Starts a request. seed picks its sample: requests of one seed and layer draw alike, position by position.
 * OUT_OF_CAPACITY when max_requests are open. */
verkv_status verkv_open(verkv_cache* cache, uint64_t seed, verkv_request* request);

/* Ends a request; its rows are free again. INVALID_ARGUMENT for one that is not open, as in every call below. */
verkv_status verkv_release(verkv_cache* cache, verkv_request request);

/* Adds tokens of a prompt; they go to host memory and wait for compress.
 * keys [tokens][kv_heads][key_dim], values [tokens][kv_heads][value_dim], both copied; positions [tokens], ascending,
 * above all before, in 0 ... 2^31 - 1. tokens = 0: nothing, pointers may be null. O(tokens) copies.
 * INVALID_ARGUMENT for positions, OUT_OF_CAPACITY for more than max_tokens or the host rows left. */
verkv_status verkv_prefill(verkv_cache* cache, verkv_request request, const uint16_t* keys, const uint16_t* values,
                           const int64_t* positions, size_t tokens);

/* Ranks all tokens of a request, draws the sample that stays resident, and sketches all keys. After prefill, and from
 * time to time later: each time afresh, of all tokens there are.
 * queries [count][query_heads][key_dim]: queries of the text, query_positions [count] where they stood, ascending.
 * Ranked is by the largest attention that any of them gives a token at least 64 positions before it; looked at are
 * those at positions last, last - stride, last - 2 stride, ..., last being the last token's. They are rounded to half
 * precision; the others may be anything. queries null and count 0: ranked by key norm (small ones matter).
 * O(n log n) a KV head beside the ranking, which reads all keys once for 64 queries.
 * INVALID_ARGUMENT when none of these positions has a query, for queries beyond half precision (65504), stride 0, keys
 * that are not finite; OUT_OF_CAPACITY when the sample has more rows than there are. */
verkv_status verkv_compress(verkv_cache* cache, verkv_request request, const float* queries,
                            const int64_t* query_positions, size_t count, size_t stride);

/* Adds tokens that were just generated: resident, and in host memory too. As prefill; also INVALID_STATE when prefilled
 * tokens wait for compress, and OUT_OF_CAPACITY for the resident rows left. */
verkv_status verkv_append(verkv_cache* cache, verkv_request request, const uint16_t* keys, const uint16_t* values,
                          const int64_t* positions, size_t tokens);

/* Forgets every token at this position or behind, and frees their rows: a rollback. O(tokens forgotten), or of all
 * where a sketch has to move. A position below 0 forgets all of them, one beyond the last none. */
verkv_status verkv_truncate(verkv_cache* cache, verkv_request request, int64_t position);

/* Forgets the tokens at positions first ... last-1; the others keep their positions. O(tokens). */
verkv_status verkv_remove(verkv_cache* cache, verkv_request request, int64_t first, int64_t last);

/* A request's part of a step. */
typedef struct {
    verkv_request request;
    const float* queries; /* [query_heads][key_dim] */
    float* output;        /* [query_heads][value_dim] */
    float* lse;           /* [query_heads]: ln of the sum of e^logit; or null */
} verkv_step_item;

/* Attention of one token each of `count` requests, whose own keys and values were appended before.
 * What the target says of each query head is within epsilon (relative, > 0) with probability 1 - delta at least, delta
 * in (0, 1), for a query fixed before the draw and weights that the sketch has right or bounds; else as far as the
 * check from the sample sees (docs/promise.md). A request without tokens: output 0, lse -infinity. Allocates nothing.
 * INVALID_ARGUMENT for a tolerance out of range (with carry_bounds delta is above 1e-3, how often bounds may fail), a
 * request that is listed twice, outputs that overlap; INVALID_STATE
 * when prefilled tokens wait for compress. */
verkv_status verkv_step(verkv_cache* cache, const verkv_step_item* items, size_t count, double epsilon, double delta);

/* One KV head of one request at one step. Rows and keys are counts; times are seconds of the thread that did it. */
typedef struct {
    size_t tokens;        /* of the request */
    size_t rows_resident; /* of them resident */
    size_t rows_fetched;  /* the plan's, for all query heads */
    size_t rows_planned;  /* the plan's, for each query head its own: their sum; joint ones are the same for each */
    size_t rows_copied;   /* of those, what no earlier step had left in staging; one that made room counts again */
    size_t shortlist_keys_read; /* keys read from host memory to weigh the shortlist exactly */
    size_t bytes_moved;         /* from host memory: copied rows and shortlisted keys */
    uint32_t rounds;            /* fetches that the check from the sample added */
    /* Relative errors, the largest of the head's query heads; NaN where a key was not a number. What was certified is
     * observed where a check ran, else after. */
    double certificate_before;   /* of the sample without a fetch */
    double certificate_after;    /* of the plan as carried out */
    double certificate_observed; /* of the sample after the fetch, by the check; 0 where there was none */
    double sketch_seconds, decide_seconds, fetch_seconds, attend_seconds;
} verkv_head_report;

/* What the last step that succeeded tells of its item number `item` and a KV head.
 * INVALID_STATE before the first step, INVALID_ARGUMENT for an item or head that it did not have. */
verkv_status verkv_report(const verkv_cache* cache, size_t item, uint32_t kv_head, verkv_head_report* report);

/* Bytes that the sketch of a KV head holds for all tokens of a request; 0 on failure, with a message. */
size_t verkv_sketch_bytes(const verkv_cache* cache, verkv_request request, uint32_t kv_head);

/* Bytes of a sketch, with these options, for a token and KV head, what a group of tokens shares spread over them; 0 for
 * a null cache. A row has 2 (key_dim + value_dim). */
double verkv_sketch_bytes_per_token(const verkv_cache* cache);

/* Tokens that a request holds, and how many of them were appended since the last compress. Either may be null. */
verkv_status verkv_tokens(const verkv_cache* cache, verkv_request request, size_t* tokens, size_t* appended);

/* Rows that are free. Either may be null. */
verkv_status verkv_free_rows(const verkv_cache* cache, size_t* host, size_t* resident);

#ifdef __cplusplus
}
#endif

#endif
