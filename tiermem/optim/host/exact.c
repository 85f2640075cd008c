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
enum { FUSED_ADAM, FUSED_ADAMW, FOREACH_ADAM, FOREACH_ADAMW, FUSED_SGD, FOREACH_SGD };
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
    int32_t scaled;     /* whether gradients are multiplied by a factor first, and stored */
    float numbers[8];   /* see adam() and sgd() */
    float factor;
    float unused;
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

/* The bits of a value rounded to bfloat16, in the upper half. What is no number stays none, if the
 * lower half of its bits is zero, as in all that comes of bfloat16 numbers. */
INLINE uint32_t to_upper(float value) {
    uint32_t bits = as_bits(value);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

INLINE uint16_t narrowed(float value, uint32_t nan) {
    return (uint16_t)(value != value ? nan : to_upper(value) >> 16);
}

/* A value as a kernel leaves it to the next one: foreach stores every result. */
INLINE float stored(float value, const int half) {
    return half ? as_float(to_upper(value) & 0xffff0000u) : value;
}

INLINE float load(const void *from, int64_t i, const int half) {
    return half ? widened(((const uint16_t *)from)[i]) : ((const float *)from)[i];
}

INLINE void store(void *to, int64_t i, float value, const int half, uint32_t nan) {
    if (half) ((uint16_t *)to)[i] = narrowed(value, nan);
    else ((float *)to)[i] = value;
}

/* What is computed, as the device has it; bfloat16 gets its own as it is stored. */
INLINE float computed(float value, const int half) { return half ? value : canonical(value); }

/* What an element is computed of is read before any of it is written, in place too. */
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)")
#else
#define EACH _Pragma("GCC ivdep")
#endif

/* Of one tensor: what is read, and where the results go, which may be the same. half: all of it is
 * bfloat16; else float32. */
typedef struct {
    const void *p, *g, *m, *v, *x;
    void *new_p, *new_m, *new_v, *new_x;
} arrays_t;

/* numbers: beta1, beta2, step_size, bias_correction2_sqrt, eps, decay, 1 - beta1, 1 - beta2.
 * decay is lr * weight_decay for FUSED_ADAMW, 1 - lr * weight_decay for FOREACH_ADAMW, else
 * weight_decay; the step_size of foreach is negative. */
INLINE void adam(const step_t *s, int64_t n, const arrays_t *a, const int half, const int foreach,
                 const int decay, const int decoupled, const int amsgrad) {
    const float beta1 = s->numbers[0], beta2 = s->numbers[1], size = s->numbers[2];
    const float root = s->numbers[3], eps = s->numbers[4], wd = s->numbers[5];
    const float rest1 = s->numbers[6], rest2 = s->numbers[7];
    const float back1 = 1.0f - rest1;
    const int near = fabsf(rest1) < 0.5f; /* which of torch's two formulas for lerp */
    const uint32_t sign = s->maximize ? 0x80000000u : 0u, nan = (uint32_t)s->nan16;
    const void *p = a->p, *g = a->g, *m = a->m, *v = a->v, *x = a->x;
    void *new_p = a->new_p, *new_m = a->new_m, *new_v = a->new_v, *new_x = a->new_x;
    EACH for (int64_t i = 0; i < n; i++) {
        float param = load(p, i, half), grad = negated(load(g, i, half), sign);
        float one = load(m, i, half), two = load(v, i, half), top, below;
        if (decay && decoupled)
            param = foreach ? stored(param * wd, half) : fma_(param, -wd, param);
        if (decay && !decoupled) {
            grad = fma_(param, wd, grad);
            if (foreach) grad = stored(grad, half);
        }
        if (foreach) {
            float apart = grad - one;
            float small = fma_(rest1, apart, one), large = fma_(-apart, back1, grad);
            one = stored(near ? small : large, half);
            two = stored(fma_(rest2, grad * grad, stored(two * beta2, half)), half);
        } else {
            float square = grad * grad;
            one = fma_(one, beta1, fma_(grad, -beta1, grad));
            two = fma_(two, beta2, fma_(square, -beta2, square));
        }
        one = computed(one, half);
        two = computed(two, half);
        top = two;
        if (amsgrad) {
            float old = load(x, i, half);
            if (foreach)
                top = (old != old || old > two) ? old : two;
            else
                top = old < two ? two : old;
            store(new_x, i, top, half, nan);
        }
        if (foreach) {
            below = stored(stored(stored(__builtin_sqrtf(top), half) / root, half) + eps, half);
            param = fma_(size, one / below, param);
        } else {
            below = __builtin_sqrtf(top) / root + eps;
            param = param - (one * size) / below;
        }
        store(new_p, i, computed(param, half), half, nan);
        store(new_m, i, one, half, nan);
        store(new_v, i, two, half, nan);
    }
}

/* One of two values, without a branch; mask: all ones or none. */
INLINE float chosen(uint32_t mask, float a, float b) {
    return as_float((as_bits(a) & mask) | (as_bits(b) & ~mask));
}

/* numbers: -lr, momentum, 1 - dampening, weight_decay. each: the result of each operation is stored
 * (foreach, in bfloat16). */
INLINE void sgd(const step_t *s, int64_t n, const arrays_t *a, const int half, const int each,
                const int momentum) {
    const float size = s->numbers[0], keep = s->numbers[1], rest = s->numbers[2];
    const float wd = s->numbers[3];
    const uint32_t sign = s->maximize ? 0x80000000u : 0u, nan = (uint32_t)s->nan16;
    const uint32_t decays = s->decay ? ~0u : 0u, nesterov = s->nesterov ? ~0u : 0u;
    const void *p = a->p, *g = a->g, *m = a->m;
    void *new_p = a->new_p, *new_m = a->new_m;
    EACH for (int64_t i = 0; i < n; i++) {
        float param = load(p, i, half), grad = negated(load(g, i, half), sign), kept;
        grad = chosen(decays, computed(stored(fma_(param, wd, grad), each), half), grad);
        if (momentum == FIRST_MOMENTUM) {
            kept = grad;
            store(new_m, i, kept, half, nan);
        } else if (momentum != NO_MOMENTUM) {
            kept = fma_(rest, grad, stored(load(m, i, half) * keep, each));
            kept = computed(stored(kept, each), half);
            store(new_m, i, kept, half, nan);
        }
        if (momentum != NO_MOMENTUM)
            grad = chosen(nesterov, stored(fma_(kept, keep, grad), each), kept);
        store(new_p, i, computed(fma_(grad, size, param), half), half, nan);
    }
    if (momentum == FIRST_MOMENTUM && each && !decays && !sign) /* a copy, bit for bit */
        memcpy(new_m, g, (size_t)n * 2);
}

#define ADAM(FOREACH, DECOUPLED)                                                            \
    do {                                                                                    \
        if (s->amsgrad && s->decay && !wide) adam(s, n, a, half, FOREACH, 1, DECOUPLED, 1); \
        else if (s->amsgrad && !wide) adam(s, n, a, half, FOREACH, 0, 0, 1);                \
        else if (s->decay) adam(s, n, a, half, FOREACH, 1, DECOUPLED, 0);                   \
        else adam(s, n, a, half, FOREACH, 0, 0, 0);                                         \
    } while (0)

INLINE void sgd_of(const step_t *s, int64_t n, const arrays_t *a, const int half, const int each) {
    if (s->momentum == NO_MOMENTUM) sgd(s, n, a, half, each, NO_MOMENTUM);
    else if (s->momentum == FIRST_MOMENTUM) sgd(s, n, a, half, each, FIRST_MOMENTUM);
    else sgd(s, n, a, half, each, MOMENTUM);
}

/* wide: what of all kinds has_wide() says. */
INLINE void block(const step_t *s, int64_t n, const arrays_t *a, const int half, const int wide) {
    switch (s->method) {
    case FUSED_ADAM: ADAM(0, 0); break;
    case FUSED_ADAMW: ADAM(0, 1); break;
    case FOREACH_ADAM: ADAM(1, 0); break;
    case FOREACH_ADAMW: ADAM(1, 1); break;
    default:
        if (wide) break;
        if (half && s->method == FOREACH_SGD) sgd_of(s, n, a, half, 1);
        else sgd_of(s, n, a, half, 0);
    }
}

INLINE float *widen(const void *from, int64_t n, float *to) {
    const uint16_t *source = from;
    for (int64_t i = 0; i < n; i++) to[i] = widened(source[i]);
    return to;
}

/* Gradients times a factor, as a kernel leaves them to the step. */
INLINE void scale(const void *from, int64_t n, float factor, void *to, const int half, uint32_t nan) {
    EACH for (int64_t i = 0; i < n; i++)
        store(to, i, computed(load(from, i, half) * factor, half), half, nan);
}

INLINE void *after(void *from, int64_t nbytes) { return from == NULL ? NULL : (char *)from + nbytes; }

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

/* Makes the step of the elements from begin to end; half: weights and state are bfloat16, else
 * float32. */
INLINE void piece(const step_t *s, int64_t begin, int64_t end, const int half, const int wide) {
    float own[4][BLOCK] __attribute__((aligned(64)));
    float gradients[BLOCK] __attribute__((aligned(64)));
    float products[BLOCK] __attribute__((aligned(64)));
    uint16_t narrow16[BLOCK] __attribute__((aligned(64)));
    const uint32_t nan = (uint32_t)s->nan16;
    const int apart = s->param_to != NULL, size = half ? 2 : 4;
    void *kept[4] = {s->param, s->first, s->second, s->largest};
    void *to[4] = {s->param_to, s->first_to, s->second_to, s->largest_to};
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t n = end - at < BLOCK ? end - at : BLOCK;
        void *in[4], *out[4];
        for (int k = 0; k < 4; k++) {
            in[k] = after(kept[k], at * size);
            out[k] = apart ? own[k] : in[k];
        }
        const void *g = after(s->grad, at * (s->grad_bf16 ? 2 : 4));
        if (s->scaled && s->grad_bf16) {
            scale(g, n, s->factor, products, 1, nan);
            g = products;
        } else if (s->scaled) {
            scale(g, n, s->factor, products, 0, nan);
            g = products;
        }
        if (half && !s->grad_bf16) { /* cast first, as for the device */
            narrow(g, n, narrow16, nan);
            g = narrow16;
        } else if (!half && s->grad_bf16) {
            g = widen(g, n, gradients);
        }
        arrays_t arrays = {in[0], g, in[1], in[2], in[3], out[0], out[1], out[2], out[3]};
        block(s, n, &arrays, half, wide);
        for (int k = 0; apart && k < 4; k++)
            if (kept[k] != NULL) put(own[k], n * size, after(to[k], at * size));
        if (s->cast != NULL && apart) {
            narrow(out[0], n, narrow16, nan);
            put(narrow16, n * 2, s->cast + at);
        } else if (s->cast != NULL) {
            narrow(out[0], n, s->cast + at, nan);
        }
    }
#if defined(__x86_64__)
    if (apart) _mm_sfence();
#endif
}

INLINE void pieces(const step_t *s, int64_t a, int64_t b) {
    if (s->bf16) piece(s, a, b, 1, 0);
    else piece(s, a, b, 0, 0);
}

#if defined(__x86_64__)
/* Adam in bfloat16 spends its time with conversions, for which wider vectors have fewer
 * instructions. Elsewhere memory, roots and quotients are what limits. */
static int has_wide(const step_t *s) {
    static int here = -1; /* every thread finds the same */
    if (here < 0)
        here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return here && s->bf16 && s->method <= FOREACH_ADAMW && !s->amsgrad;
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))) static void
make_wide(const step_t *s, int64_t a, int64_t b) {
    piece(s, a, b, 1, 1);
}
__attribute__((target("avx2,fma"))) static void make_any(const step_t *s, int64_t a, int64_t b) {
    pieces(s, a, b);
}
static void make(const step_t *s, int64_t a, int64_t b) {
    if (has_wide(s)) make_wide(s, a, b);
    else make_any(s, a, b);
}
#else
static void make(const step_t *s, int64_t a, int64_t b) { pieces(s, a, b); }
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
