/* How the libraries of this folder reach what stands behind them: one function, which a test sets.
 *
 * Each function of a library passes its own name and its arguments as words. Where nobody stands behind, the library answers
 * itself, so that what a call costs can be measured. */
#ifndef ONEACCORD_UPCALL_H
#define ONEACCORD_UPCALL_H

#include <stddef.h>
#include <stdint.h>

/* Returns the status of the call; `made` takes what it makes, if it makes something. */
typedef int upcall_function(const char *name, const intptr_t *words, int count, intptr_t *made);

static upcall_function *upcall;

void set_upcall(upcall_function *function);

void set_upcall(upcall_function *function)
{
    upcall = function;
}

#define W(argument) ((intptr_t)(argument))
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* One line makes a function: its name in C, the name behind, its parameters, and its arguments in the order of the name behind. */
#define FUNCTION(name, method, parameters, ...) \
    int name parameters; \
    int name parameters \
    { \
        const intptr_t words[] = {__VA_ARGS__}; \
        return upcall ? upcall(#method, words, COUNT(words), NULL) : 0; \
    }

/* Likewise, for what makes something: `type` is what the parameter `out` points to. */
#define MAKER(name, method, type, parameters, ...) \
    int name parameters; \
    int name parameters \
    { \
        const intptr_t words[] = {__VA_ARGS__}; \
        intptr_t made = 0; \
        int status = upcall ? upcall(#method, words, COUNT(words), &made) : 0; \
        *out = (type)made; \
        return status; \
    }

#endif
