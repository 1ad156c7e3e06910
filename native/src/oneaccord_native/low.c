/* Reductions of floats of 16 and 8 bits, with the bits that NumPy and ml_dtypes give: oneaccord.arrays.low_precision in C.

   A sum or product of two such numbers, rounded to float32 and then to 16 bits, is the same as rounded once (S. A. Figueroa, When is double rounding
   innocuous?, ACM SIGNUM Newsletter 30(3), 1995). NaN, infinities, and what NumPy may warn of, are left to Python, a block at a time. The loops have no
   branches, so that a compiler makes vectors of them; for x86 it makes several forms, of which the processor gets its best. */
#include "native.h"

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define CLONES
#endif

#define BLOCK 2048

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* float16. With exponent and mantissa where a float32 has them, it is 2**-112 times as large. */

static inline float from_half(uint32_t half) { return float_of((half & 0x7FFF) << 13 | (half & 0x8000) << 16) * 0x1p112f; }

/* Adding 0.5, whose last bit is that of a subnormal float16, rounds to that bit. */
static inline uint32_t to_half(float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
    uint32_t normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
    return (bits >> 16 & 0x8000) | (magnitude < 0x38800000 ? subnormal : normal);
}

static inline uint32_t is_special_half(uint32_t half) { return (half & 0x7FFF) >= 0x7C00; }

static inline uint32_t overflows_half(float value) { return (bits_of(value) & 0x7FFFFFFF) >= 0x477FF000; /* 65520 */ }

/* bfloat16: the upper half of a float32. */

static inline float from_bfloat(uint32_t bfloat) { return float_of(bfloat << 16); }

static inline uint32_t to_bfloat(float value) {
    uint32_t bits = bits_of(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static inline uint32_t is_infinite(float value) { return (bits_of(value) & 0x7FFFFFFF) >= 0x7F800000; /* or NaN, which comes of NaN */ }

/* A number whose order is that of the float16; -0 is less than 0. */
static inline int32_t order_of(uint32_t half) { return half & 0x8000 ? -(int32_t)(half & 0x7FFF) - 1 : (int32_t)half; }

/* Each of these combines a block, and tells whether anything in it is for Python. */
typedef unsigned (*Block)(const void *left, const void *right, void *target, size_t count, const uint16_t *table);

#define BLOCK_OF(name, type, result, refused)                                                                                       \
    CLONES static unsigned name(const void *left, const void *right, void *target, size_t count, const uint16_t *table) {          \
        const type *lefts = left, *rights = right;                                                                                  \
        type *targets = target;                                                                                                     \
        unsigned bad = 0;                                                                                                           \
        (void)table;                                                                                                                \
        for (size_t i = 0; i < count; i++) {                                                                                        \
            uint32_t a = lefts[i], b = rights[i], made = (result);                                                                  \
            bad |= (refused);                                                                                                       \
            targets[i] = (type)made;                                                                                                \
        }                                                                                                                           \
        return bad;                                                                                                                 \
    }

#define HALF_SUM (from_half(a) + from_half(b))
#define HALF_PRODUCT (from_half(a) * from_half(b))
#define BFLOAT_SUM (from_bfloat(a) + from_bfloat(b))
#define BFLOAT_PRODUCT (from_bfloat(a) * from_bfloat(b))
#define ARE_ZEROS (!((a | b) & 0x7FFF))
#define SPECIAL_HALVES (is_special_half(a) | is_special_half(b))

BLOCK_OF(add_half, uint16_t, to_half(HALF_SUM), SPECIAL_HALVES | overflows_half(HALF_SUM))
BLOCK_OF(multiply_half, uint16_t, to_half(HALF_PRODUCT), SPECIAL_HALVES | overflows_half(HALF_PRODUCT))
BLOCK_OF(add_bfloat, uint16_t, to_bfloat(BFLOAT_SUM), is_infinite(BFLOAT_SUM))
BLOCK_OF(multiply_bfloat, uint16_t, to_bfloat(BFLOAT_PRODUCT), is_infinite(BFLOAT_PRODUCT))
/* Of zeros with different signs: the lesser or greater one, or the left, or the right one, as NumPy chooses. */
BLOCK_OF(least_half, uint16_t, order_of(a) < order_of(b) ? a : b, SPECIAL_HALVES)
BLOCK_OF(least_half_left, uint16_t, ARE_ZEROS || order_of(a) < order_of(b) ? a : b, SPECIAL_HALVES)
BLOCK_OF(least_half_right, uint16_t, !ARE_ZEROS && order_of(a) < order_of(b) ? a : b, SPECIAL_HALVES)
BLOCK_OF(most_half, uint16_t, order_of(a) > order_of(b) ? a : b, SPECIAL_HALVES)
BLOCK_OF(most_half_left, uint16_t, ARE_ZEROS || order_of(a) > order_of(b) ? a : b, SPECIAL_HALVES)
BLOCK_OF(most_half_right, uint16_t, !ARE_ZEROS && order_of(a) > order_of(b) ? a : b, SPECIAL_HALVES)
/* Of 8 bits: a table of all results, with more bits where Python has something to say. */
BLOCK_OF(look_up, uint8_t, table[a << 8 | b], made >> 8)

#if defined(__x86_64__) && defined(__GNUC__)
/* Processors that convert float16 themselves: eight at a time. What is infinite or NaN shows in the result. */
#include <immintrin.h>
#define HAS_CONVERSIONS (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
#define HALVES_OF(name, operation, rest)                                                                                            \
    __attribute__((target("avx2,f16c"))) static unsigned name(const void *left, const void *right, void *target, size_t count,    \
                                                              const uint16_t *table) {                                             \
        const __m128i *lefts = left, *rights = right, infinity = _mm_set1_epi16(0x7C00);                                            \
        __m128i *targets = target, bad = _mm_setzero_si128();                                                                       \
        size_t eights = count / 8;                                                                                                  \
        for (size_t i = 0; i < eights; i++) {                                                                                       \
            __m256 one = _mm256_cvtph_ps(_mm_loadu_si128(lefts + i)), other = _mm256_cvtph_ps(_mm_loadu_si128(rights + i));        \
            __m128i made = _mm256_cvtps_ph(operation(one, other), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);                 \
            bad = _mm_or_si128(bad, _mm_cmpeq_epi16(_mm_and_si128(made, infinity), infinity));                                      \
            _mm_storeu_si128(targets + i, made);                                                                                    \
        }                                                                                                                           \
        unsigned others = rest(lefts + eights, rights + eights, targets + eights, count % 8, table);                               \
        return others | (unsigned)_mm_movemask_epi8(bad);                                                                           \
    }
HALVES_OF(add_halves, _mm256_add_ps, add_half)
HALVES_OF(multiply_halves, _mm256_mul_ps, multiply_half)
#else
#define HAS_CONVERSIONS false
#define add_halves add_half
#define multiply_halves multiply_half
#endif

static const struct {
    const char *name;
    Block block;
    bool is_float16; /* which needs subnormal numbers of float32 */
    bool looks_up;
} blocks[] = {
    {"float16 add", add_half, true, false},
    {"float16 multiply", multiply_half, true, false},
    {"float16 minimum", least_half, false, false},
    {"float16 minimum, left zero", least_half_left, false, false},
    {"float16 minimum, right zero", least_half_right, false, false},
    {"float16 maximum", most_half, false, false},
    {"float16 maximum, left zero", most_half_left, false, false},
    {"float16 maximum, right zero", most_half_right, false, false},
    {"bfloat16 add", add_bfloat, false, false},
    {"bfloat16 multiply", multiply_bfloat, false, false},
    {"float8", look_up, false, true},
};

struct Low {
    PyObject_HEAD
    Block block;
    bool is_float16;
    size_t itemsize;
    Py_buffer table; /* held as long as this lives; none where there is none */
};

/* Somebody may have set this thread's processor to take subnormal numbers for zero, as libraries do by accident. */
static bool flushes_subnormals(void) {
    volatile float subnormal = 1e-40f;
    return subnormal + subnormal == 0.0f;
}

/* Combine as many elements as can be, from the first on; return how many. Without a target nothing is written. */
size_t low_combine(const Low *low, void *target, const void *left, const void *right, size_t count) {
    uint16_t made[BLOCK];
    size_t done = 0, itemsize = low->itemsize;
    if (low->is_float16 && flushes_subnormals()) return 0;
    while (done < count) {
        size_t next = count - done < BLOCK ? count - done : BLOCK;
        const char *lefts = (const char *)left + done * itemsize, *rights = (const char *)right + done * itemsize;
        if (low->block(lefts, rights, made, next, low->table.buf)) break;
        if (target) memcpy((char *)target + done * itemsize, made, next * itemsize);
        done += next;
    }
    return done;
}


static int low_init(Low *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"name", "table", NULL};
    const char *name;
    PyObject *table = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|O", names, &name, &table)) return -1;
    for (size_t i = 0; !self->block && i < sizeof blocks / sizeof *blocks; i++) {
        if (strcmp(blocks[i].name, name)) continue;
        bool looks_up = blocks[i].looks_up;
        if (looks_up && PyObject_GetBuffer(table, &self->table, PyBUF_SIMPLE) < 0) return -1;
        if (looks_up && self->table.len < 2 << 16) break;
        self->itemsize = looks_up ? 1 : 2;
        self->is_float16 = blocks[i].is_float16;
        self->block = blocks[i].block;
        if (HAS_CONVERSIONS && i < 2) self->block = i ? multiply_halves : add_halves;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "C knows no reduction %s, or its table is none", name);
    return -1;
}

static void low_dealloc(Low *self) {
    PyTypeObject *type = TYPE_OF(self);
    if (self->table.obj) PyBuffer_Release(&self->table);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* combine(left, right, out, start): combine the elements of plain arrays of one size, from `start` on, which are those of `out` or apart from it; return
   the first element that was not. */
static PyObject *py_combine(Low *self, PyObject *args) {
    PyArrayObject *arrays[3];
    Py_ssize_t start;
    if (!PyArg_ParseTuple(args, "O!O!O!n", &PyArray_Type, &arrays[0], &PyArray_Type, &arrays[1], &PyArray_Type, &arrays[2], &start)) return NULL;
    npy_intp size = PyArray_SIZE(arrays[2]);
    bool fits = self->block && start >= 0 && start <= size && PyArray_ISWRITEABLE(arrays[2]);
    for (int i = 0; i < 3; i++)
        fits = fits && PyArray_IS_C_CONTIGUOUS(arrays[i]) && PyArray_SIZE(arrays[i]) == size && (size_t)PyArray_ITEMSIZE(arrays[i]) == self->itemsize;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "plain arrays of one size");
        return NULL;
    }
    size_t skipped = (size_t)start * self->itemsize, done;
    char *left = PyArray_BYTES(arrays[0]) + skipped, *right = PyArray_BYTES(arrays[1]) + skipped, *target = PyArray_BYTES(arrays[2]) + skipped;
    PyThreadState *released = size > BLOCK ? PyEval_SaveThread() : NULL;
    done = low_combine(self, target, left, right, (size_t)(size - start));
    if (released) PyEval_RestoreThread(released);
    return PyLong_FromSize_t((size_t)start + done);
}

static PyMethodDef low_methods[] = {
    {"combine", (PyCFunction)py_combine, METH_VARARGS, "combine(left, right, out, start): reduce from an element on; return the first that Python must do."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot low_slots[] = {
    {Py_tp_doc, "A reduction of floats of 16 or 8 bits."},
    {Py_tp_init, low_init},
    {Py_tp_dealloc, low_dealloc},
    {Py_tp_methods, low_methods},
    {0, NULL},
};

PyType_Spec low_spec = {
    .name = "oneaccord_native._core.Low",
    .basicsize = sizeof(Low),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = low_slots,
};
