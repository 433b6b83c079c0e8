/* Calls of C functions, and access to words of memory, by address: what `_calls.py` has in Python. */

#include <Python.h>
#include <stdint.h>

typedef unsigned long long aiocuda_word;

static inline int aiocuda_call_one(aiocuda_word function, aiocuda_word first) {
    return ((int (*)(aiocuda_word))(uintptr_t)function)(first);
}

static inline int aiocuda_call_two(aiocuda_word function, aiocuda_word first, aiocuda_word second) {
    return ((int (*)(aiocuda_word, aiocuda_word))(uintptr_t)function)(first, second);
}

static inline int aiocuda_call_three(aiocuda_word function, aiocuda_word first, aiocuda_word second, aiocuda_word third) {
    return ((int (*)(aiocuda_word, aiocuda_word, aiocuda_word))(uintptr_t)function)(first, second, third);
}

static inline int aiocuda_call_four(aiocuda_word function, aiocuda_word block) {
    const aiocuda_word *words = (const aiocuda_word *)(uintptr_t)block;
    return ((int (*)(aiocuda_word, aiocuda_word, aiocuda_word, aiocuda_word))(uintptr_t)function)(
        words[0], words[1], words[2], words[3]);
}

/* Volatile: a fault or a fork changes it between two calls. */
static inline long long aiocuda_read_word(aiocuda_word address) {
    return *(volatile const int64_t *)(uintptr_t)address;
}

static inline void aiocuda_add_to_word(aiocuda_word address, long count) { *(int64_t *)(uintptr_t)address += count; }

static inline PyObject *aiocuda_next_id(void) {
    static unsigned long long last = 0;
    return PyLong_FromUnsignedLongLong(++last);
}

/* A subclass in Python is made without the search for its `__init__`. */
static inline PyObject *aiocuda_new_object(PyObject *made) {
    static PyObject *nothing = NULL;
    if (nothing == NULL && (nothing = PyTuple_New(0)) == NULL) {
        return NULL;
    }
    return ((PyTypeObject *)made)->tp_new((PyTypeObject *)made, nothing, NULL);
}

/* The usual arguments of kernels. All others, and those that do not fit, are left to `struct`: the answer is 0. */
static inline int aiocuda_write_value(int letter, aiocuda_word address, PyObject *value) {
    void *place = (void *)(uintptr_t)address;
    if (PyLong_CheckExact(value)) {
        int overflow = 0;
        long long number;
        if (letter == 'P' || letter == 'Q') {
            unsigned long long word = PyLong_AsUnsignedLongLong(value);
            if (word == (unsigned long long)-1 && PyErr_Occurred()) {
                PyErr_Clear();
                return 0;
            }
            *(uint64_t *)place = word;
            return 1;
        }
        number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow) {
            return 0;
        }
        if (letter == 'q') {
            *(int64_t *)place = number;
            return 1;
        }
        if (letter == 'i' && number == (int32_t)number) {
            *(int32_t *)place = (int32_t)number;
            return 1;
        }
        if (letter == 'I' && number == (uint32_t)number) {
            *(uint32_t *)place = (uint32_t)number;
            return 1;
        }
        return 0;
    }
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        if (letter == 'd') {
            *(double *)place = number;
            return 1;
        }
        if (letter == 'f') {
            float rounded = (float)number;
            if (rounded - rounded != 0 && number - number == 0) {
                return 0; /* it is finite, and too large */
            }
            *(float *)place = rounded;
            return 1;
        }
    }
    return 0;
}
