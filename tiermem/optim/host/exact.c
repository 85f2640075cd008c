/* Steps of Adam, AdamW and SGD on the host, operation by operation as CUDA makes them.
 *
 * Read in the machine code of torch's kernels (docs/adr/0045-the-hosts-step-with-the-devices-bits.md).
 * Everything is float32: each operation below rounds once, fma() rounds once for both of its
 * operations, roots and quotients are IEEE's, subnormal numbers are kept. To be compiled with
 * -ffp-contract=off and without -ffast-math: what is fused is written as fma.
 *
 * What is computed and is no number is written as the device writes it, 0x7fffffff.
 */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define BLOCK 1024            /* elements whose intermediate values stay in the first cache */
#define PIECE (64 * BLOCK)    /* elements that a thread takes at a time */

/* Which sequence of operations. */
enum { FUSED_ADAM, FUSED_ADAMW, FOREACH_ADAM, FOREACH_ADAMW, SGD };
/* What SGD does with its momentum. */
enum { NO_MOMENTUM, FIRST_MOMENTUM, MOMENTUM };

/* One step of one tensor. Layout shared with exact.py. */
typedef struct {
    int32_t method;
    int32_t bf16;       /* weights and state are bfloat16; else float32 */
    int32_t grad_bf16;  /* so are gradients */
    int32_t maximize;
    int32_t decay;      /* whether there is a weight decay */
    int32_t amsgrad;    /* Adam */
    int32_t momentum;   /* SGD: one of the three above */
    int32_t nesterov;   /* SGD */
    int32_t nan16;      /* bits of what is no number in bfloat16, on the device */
    int32_t unused;
    float numbers[8];   /* see adam() and sgd() */
    int64_t count;
    void *param, *grad, *first, *second, *largest;
    uint16_t *cast;     /* where the bfloat16 cast of the new weights goes, or NULL */
    /* where new weights and state go, so that the old ones stay; all NULL where they take their place */
    void *param_to, *first_to, *second_to, *largest_to;
} step_t;

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

INLINE float canonical(float value) { return value != value ? as_float(0x7fffffffu) : value; }

INLINE float negated(float value, uint32_t sign) { return as_float(as_bits(value) ^ sign); }

INLINE float widened(uint16_t bits) { return as_float((uint32_t)bits << 16); }

INLINE uint16_t narrowed(float value, uint32_t nan) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value != value ? nan : rounded);
}

/* numbers: beta1, beta2, step_size, bias_correction2_sqrt, eps, decay, 1 - beta1, 1 - beta2.
 * decay is lr * weight_decay for FUSED_ADAMW, 1 - lr * weight_decay for FOREACH_ADAMW, else
 * weight_decay; the step_size of foreach is negative. */
INLINE void adam(const step_t *s, int64_t n, float *restrict p, const float *restrict g0,
                 float *restrict m, float *restrict v, float *restrict x, const int foreach,
                 const int decay, const int decoupled, const int amsgrad) {
    const float beta1 = s->numbers[0], beta2 = s->numbers[1], size = s->numbers[2];
    const float root = s->numbers[3], eps = s->numbers[4], wd = s->numbers[5];
    const float rest1 = s->numbers[6], rest2 = s->numbers[7];
    const float back1 = 1.0f - rest1;
    const int near = fabsf(rest1) < 0.5f; /* which of torch's two formulas for lerp */
    const uint32_t sign = s->maximize ? 0x80000000u : 0u;
    for (int64_t i = 0; i < n; i++) {
        float param = p[i], grad = negated(g0[i], sign), one = m[i], two = v[i], top;
        if (decay && decoupled)
            param = foreach ? param * wd : fma_(param, -wd, param);
        if (decay && !decoupled)
            grad = fma_(param, wd, grad);
        if (foreach) {
            float apart = grad - one;
            float small = fma_(rest1, apart, one), large = fma_(-apart, back1, grad);
            one = near ? small : large;
            two = fma_(rest2, grad * grad, two * beta2);
        } else {
            float square = grad * grad;
            one = fma_(one, beta1, fma_(grad, -beta1, grad));
            two = fma_(two, beta2, fma_(square, -beta2, square));
        }
        one = canonical(one);
        two = canonical(two);
        top = two;
        if (amsgrad) {
            float old = x[i];
            if (foreach)
                top = (old != old || old > two) ? old : two;
            else
                top = old < two ? two : old;
            x[i] = top;
        }
        float below = __builtin_sqrtf(top) / root + eps;
        param = foreach ? fma_(size, one / below, param) : param - (one * size) / below;
        p[i] = canonical(param);
        m[i] = one;
        v[i] = two;
    }
}

/* numbers: -lr, momentum, 1 - dampening, weight_decay. */
INLINE void sgd(const step_t *s, int64_t n, float *restrict p, const float *restrict g0,
                float *restrict m, const int decay, const int momentum, const int nesterov) {
    const float size = s->numbers[0], keep = s->numbers[1], rest = s->numbers[2];
    const float wd = s->numbers[3];
    const uint32_t sign = s->maximize ? 0x80000000u : 0u;
    for (int64_t i = 0; i < n; i++) {
        float param = p[i], grad = negated(g0[i], sign), kept;
        if (decay)
            grad = canonical(fma_(param, wd, grad));
        if (momentum != NO_MOMENTUM) {
            kept = momentum == FIRST_MOMENTUM ? grad : canonical(fma_(rest, grad, m[i] * keep));
            m[i] = kept;
            grad = nesterov ? fma_(kept, keep, grad) : kept;
        }
        p[i] = canonical(fma_(grad, size, param));
    }
}

#define ADAM(FOREACH, DECOUPLED)                                                         \
    do {                                                                                 \
        if (s->decay && s->amsgrad) adam(s, n, p, g, m, v, x, FOREACH, 1, DECOUPLED, 1); \
        else if (s->decay) adam(s, n, p, g, m, v, x, FOREACH, 1, DECOUPLED, 0);          \
        else if (s->amsgrad) adam(s, n, p, g, m, v, x, FOREACH, 0, 0, 1);                \
        else adam(s, n, p, g, m, v, x, FOREACH, 0, 0, 0);                                \
    } while (0)

#define SGD_(MOMENTUM, NESTEROV)                                \
    do {                                                        \
        if (s->decay) sgd(s, n, p, g, m, 1, MOMENTUM, NESTEROV); \
        else sgd(s, n, p, g, m, 0, MOMENTUM, NESTEROV);         \
    } while (0)

INLINE void block(const step_t *s, int64_t n, float *p, const float *g, float *m, float *v,
                  float *x) {
    switch (s->method) {
    case FUSED_ADAM: ADAM(0, 0); break;
    case FUSED_ADAMW: ADAM(0, 1); break;
    case FOREACH_ADAM: ADAM(1, 0); break;
    case FOREACH_ADAMW: ADAM(1, 1); break;
    default:
        if (s->momentum == NO_MOMENTUM) SGD_(NO_MOMENTUM, 0);
        else if (s->momentum == FIRST_MOMENTUM && s->nesterov) SGD_(FIRST_MOMENTUM, 1);
        else if (s->momentum == FIRST_MOMENTUM) SGD_(FIRST_MOMENTUM, 0);
        else if (s->nesterov) SGD_(MOMENTUM, 1);
        else SGD_(MOMENTUM, 0);
    }
}

INLINE float *widen(const void *from, int64_t at, int64_t n, float *to) {
    const uint16_t *source = (const uint16_t *)from + at;
    for (int64_t i = 0; i < n; i++) to[i] = widened(source[i]);
    return to;
}

INLINE void narrow(const float *from, int64_t n, uint16_t *to, uint32_t nan) {
    for (int64_t i = 0; i < n; i++) to[i] = narrowed(from[i], nan);
}

/* Writes what is not read again soon past the caches: a line that is written whole need not be read
 * before. The caller fences. */
INLINE void put(const void *from, int64_t nbytes, void *to) {
#if defined(__x86_64__)
    if (((uintptr_t)to & 15u) == 0) {
        int64_t whole = nbytes & ~(int64_t)15;
        for (int64_t i = 0; i < whole; i += 16)
            _mm_stream_si128((__m128i *)((char *)to + i),
                             _mm_load_si128((const __m128i *)((const char *)from + i)));
        memcpy((char *)to + whole, (const char *)from + whole, (size_t)(nbytes - whole));
        return;
    }
#endif
    memcpy(to, from, (size_t)nbytes);
}

/* Makes the step of the elements from begin to end. */
INLINE void piece(const step_t *s, int64_t begin, int64_t end) {
    float own[5][BLOCK] __attribute__((aligned(64)));
    uint16_t narrow16[BLOCK] __attribute__((aligned(64)));
    const uint32_t nan = (uint32_t)s->nan16;
    const int apart = s->param_to != NULL;
    void *kept[4] = {s->param, s->first, s->second, s->largest};
    void *to[4] = {s->param_to, s->first_to, s->second_to, s->largest_to};
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t n = end - at < BLOCK ? end - at : BLOCK;
        float *in[4];
        const float *g = s->grad_bf16 ? widen(s->grad, at, n, own[4]) : (float *)s->grad + at;
        for (int k = 0; k < 4; k++)
            in[k] = kept[k] == NULL ? NULL
                    : s->bf16       ? widen(kept[k], at, n, own[k])
                    : apart         ? memcpy(own[k], (float *)kept[k] + at, (size_t)n * 4)
                                    : (float *)kept[k] + at;
        block(s, n, in[0], g, in[1], in[2], in[3]);
        for (int k = 0; k < 4; k++) {
            if (kept[k] == NULL) continue;
            if (s->bf16)
                narrow(in[k], n, (uint16_t *)(apart ? to[k] : kept[k]) + at, nan);
            else if (apart)
                put(in[k], n * 4, (float *)to[k] + at);
        }
        if (s->cast != NULL && apart) {
            narrow(in[0], n, narrow16, nan);
            put(narrow16, n * 2, s->cast + at);
        } else if (s->cast != NULL) {
            narrow(in[0], n, s->cast + at, nan);
        }
    }
#if defined(__x86_64__)
    if (apart) _mm_sfence();
#endif
}

#if defined(__x86_64__)
/* Wider vectors are no faster: memory, roots and quotients are what limits. */
__attribute__((target("avx2,fma"))) static void make(const step_t *s, int64_t a, int64_t b) {
    piece(s, a, b);
}
#else
static void make(const step_t *s, int64_t a, int64_t b) { piece(s, a, b); }
#endif

/* Whether this processor has what the loop is compiled for. */
EXPORT int tiermem_runs_here(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__aarch64__)
    return 1;
#else
    return 0; /* fma may be a slow function there */
#endif
}

/* Rounds to nearest and keeps subnormal numbers, whatever the thread did before. */
static void run_piece(const step_t *s, int64_t begin, int64_t end) {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    make(s, begin, end);
    _mm_setcsr(before);
#elif defined(__aarch64__)
    uint64_t before, none = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"(none));
    make(s, begin, end);
    __asm__ volatile("msr fpcr, %0" ::"r"(before));
#else
    make(s, begin, end);
#endif
}

/* -- threads ------------------------------------------------------------ */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more, idle;
    pthread_t *threads;
    int count, busy, closing;
    uint64_t round;
    const step_t *steps;
    int64_t pieces, next;
} pool_t;

/* Takes pieces of the current work until there are none; the lock is held on entry and exit. */
static void take(pool_t *pool) {
    while (pool->next < pool->pieces) {
        int64_t number = pool->next++;
        const step_t *s = pool->steps;
        pthread_mutex_unlock(&pool->lock);
        int64_t pieces = (s->count + PIECE - 1) / PIECE;
        while (number >= pieces) {
            number -= pieces;
            s++;
            pieces = (s->count + PIECE - 1) / PIECE;
        }
        int64_t begin = number * PIECE, end = begin + PIECE;
        run_piece(s, begin, end < s->count ? end : s->count);
        pthread_mutex_lock(&pool->lock);
    }
}

static void *work(void *given) {
    pool_t *pool = given;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    while (1) {
        while (pool->round == seen && !pool->closing) pthread_cond_wait(&pool->more, &pool->lock);
        if (pool->closing) break;
        seen = pool->round;
        pool->busy++;
        take(pool);
        if (--pool->busy == 0) pthread_cond_signal(&pool->idle);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

EXPORT void tiermem_close(pool_t *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->count; i++) pthread_join(pool->threads[i], NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->more);
    pthread_cond_destroy(&pool->idle);
    free(pool->threads);
    free(pool);
}

/* Returns threads that wait for work: one less than asked for, as the caller works too. Where the
 * system starts fewer, the others do the work. NULL without memory. */
EXPORT pool_t *tiermem_open(int threads) {
    pool_t *pool = calloc(1, sizeof *pool);
    if (pool == NULL) return NULL;
    pool->threads = calloc(threads > 1 ? threads - 1 : 1, sizeof(pthread_t));
    if (pool->threads == NULL) {
        free(pool);
        return NULL;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->more, NULL);
    pthread_cond_init(&pool->idle, NULL);
    for (int i = 0; i < threads - 1; i++)
        if (pthread_create(&pool->threads[pool->count], NULL, work, pool) == 0) pool->count++;
    return pool;
}

/* Makes the steps of some tensors; one caller at a time. */
EXPORT void tiermem_steps(pool_t *pool, const step_t *steps, int64_t count) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < count; i++) pieces += (steps[i].count + PIECE - 1) / PIECE;
    pthread_mutex_lock(&pool->lock);
    pool->steps = steps;
    pool->pieces = pieces;
    pool->next = 0;
    if (pieces > 1) {
        pool->round++;
        pthread_cond_broadcast(&pool->more);
    }
    take(pool);
    while (pool->busy) pthread_cond_wait(&pool->idle, &pool->lock);
    pool->pieces = 0;
    pthread_mutex_unlock(&pool->lock);
}

/* -- the device's powf --------------------------------------------------- */

/* base**exponent as CUDA's powf has it, for 0 <= base < 1 and exponent >= 1.
 *
 * All of it is float32 but one reciprocal, of a number between 1.7 and 2.5, that the device has from
 * a table which nobody has published: it is off by at most one unit in the last place from the
 * rounded one, and which of the three it is for a base is found by trying. */
EXPORT float tiermem_power(float base, float exponent, int off) {
    if (base == 0.0f) return 0.0f;
    int small = base < 1.175494350822287508e-38f;
    float scaled = small ? base * 16777216.0f : base;
    uint32_t high = (as_bits(scaled) - 0x3f3504f3u) & 0xff800000u;
    float part = as_float(as_bits(scaled) - high);
    float whole = fma_((float)(int32_t)high, 1.1920928955078125e-07f, small ? -24.0f : 0.0f);
    float less = part - 1.0f;
    float inverse = as_float(as_bits(1.0f / (part + 1.0f)) + (uint32_t)off);
    float ratio = inverse * (less + less);
    float left = less - ratio;
    float square = ratio * ratio;
    float sum = fma_(ratio, 1.4426950216293334961f, whole);
    left = inverse * fma_(less, -ratio, left + left);
    float low = fma_(ratio, 1.4426950216293334961f, whole - sum);
    low = fma_(left, 1.4426950216293334961f, low);
    low = fma_(ratio, 1.9251366722983220825e-08f, low);
    float series = as_float(0x3a2c32e4u);
    series = fma_(square, series, as_float(0x3b52e7dbu));
    series = fma_(square, series, as_float(0x3c93bb73u));
    series = square * fma_(square, series, as_float(0x3df6384fu));
    low = fma_(ratio, series, fma_(left, series * 3.0f, low));
    float log = sum + low;
    low = low - (log - sum);
    float product = exponent * log;
    float nearest = rintf(product);
    float error = fma_(exponent, low, fma_(exponent, log, -product));
    float rest = error + (product - nearest);
    float value = as_float(0x391fcb8eu);
    value = fma_(rest, value, as_float(0x3aaf85edu));
    value = fma_(rest, value, as_float(0x3c1d9856u));
    value = fma_(rest, value, as_float(0x3d6357bbu));
    value = fma_(rest, value, as_float(0x3e75fdecu));
    value = fma_(rest, value, as_float(0x3f317218u));
    value = fma_(rest, value, 1.0f);
    if (fabsf(product) > 152.0f) return product >= 0.0f ? INFINITY : 0.0f;
    uint32_t shift = nearest > 0.0f ? 0u : 0x83000000u;
    value = value * as_float(shift + 0x7f000000u);
    return value * as_float(((uint32_t)(int32_t)nearest << 23) - shift);
}
