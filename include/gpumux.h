/*
 * gpumux: what a program may tell the library that `gpumux run` preloads into it.
 *
 * Nothing needs to be linked: the functions are weak, and where the library is not preloaded the inline
 * functions below do nothing. Include this header and call them.
 *
 *     gpumux_hint_if_there(0, 300);       // a request came in: its work reaches device 0 in about 300 µs
 *     uint64_t request = gpumux_begin_if_there();
 *     prepare_input(); launch(); wait();
 *     gpumux_end_if_there(request);       // `gpumux ps --json` shows count, median and 99% of request times
 *
 * All functions may be called from any thread at any time, also during stream captures, in forked
 * children and without a daemon; they never wait for the daemon and never fail the program.
 */
#ifndef GPUMUX_H
#define GPUMUX_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What became of a hint. */
enum {
    GPUMUX_HELD = 0,        /* the device is being taken */
    GPUMUX_ALREADY = 1,     /* it is held, or being taken, already */
    GPUMUX_NEEDLESS = 2,    /* nothing to gain: no other tenant competes, the tenant is not of class latency or takes no
                               hints, the program has work on the device, a capture goes on, or there is no daemon */
    GPUMUX_TOO_EARLY = 3,   /* more than a second ahead, or 64 hints are waiting already: hint later */
    GPUMUX_LATER = 4,       /* the device is taken shortly before the work comes */
    GPUMUX_IMPOSSIBLE = -1  /* no context of this process on that device, or its driver refuses */
};

/*
 * Announces that work for a device is coming: the switch from its owner happens now, or shortly before the
 * work is expected, and not when it is launched. The device is given back when work was launched and, at the latest, 100 µs after
 * it was expected (after 500 µs when `expected_us` is 0: unknown).
 *
 * `device` is the CUDA ordinal. The process must have launched something on it before. The first hint of a process may take
 * some milliseconds, because it loads a kernel; later ones take about as long as two launches.
 */
int gpumux_hint(int device, unsigned expected_us) __attribute__((weak));

/* A request begins. The answer is for gpumux_end, which may be called by another thread. */
uint64_t gpumux_begin(void) __attribute__((weak));

/* The request of a gpumux_begin is done. */
void gpumux_end(uint64_t request) __attribute__((weak));

/* What a program may say of its device memory, and the answers. */
enum {
    GPUMUX_KEEP = 0,         /* its contents count; this is so at first */
    GPUMUX_COLD = 1,         /* it is rarely used: it is moved to the host before others */
    GPUMUX_DISCARDABLE = 2,  /* its contents need not survive a move: a cache, say. It is not copied */

    GPUMUX_DONE = 0,
    GPUMUX_LOST = 1,         /* to GPUMUX_KEEP: some of it was discardable and has been moved: its contents are undefined */
    GPUMUX_UNKNOWN = -1      /* no memory of cuMemAlloc or cudaMalloc that gpumux can move, or no such advice */
};

/*
 * Says something of `bytes` of device memory from `address` on, up to the end of their allocation. Say GPUMUX_KEEP, and look
 * at the answer, before contents that were discardable are used again.
 */
int gpumux_advise(uint64_t address, uint64_t bytes, int advice) __attribute__((weak));

/*
 * Gives back memory of a device (its CUDA ordinal) that the program can do without, such as the free blocks of a caching
 * allocator: `missing` bytes are wanted, less or more may be freed. Returns how many bytes were freed.
 */
typedef uint64_t (*gpumux_reclaim)(int device, uint64_t missing, void *user);

/*
 * Has `function` called, with `user`, when others need memory on a device of which the program has some: before anything of the
 * program's is moved. It is called in a thread of its own, once at a time and rarely, and may free memory as the program
 * does. No caller waits for it longer than a second. Null instead of a function: none is called any more; the call waits until
 * none runs, at most two seconds. Returns 0, or -1 where that is impossible: in a forked child, with more than 64 functions, when
 * one still runs.
 */
int gpumux_on_reclaim(gpumux_reclaim function, void *user) __attribute__((weak));

/* The same, for programs that may run without gpumux. */
static inline int gpumux_hint_if_there(int device, unsigned expected_us)
{
    return gpumux_hint ? gpumux_hint(device, expected_us) : GPUMUX_NEEDLESS;
}

static inline uint64_t gpumux_begin_if_there(void)
{
    return gpumux_begin ? gpumux_begin() : 0;
}

static inline void gpumux_end_if_there(uint64_t request)
{
    if (gpumux_end)
        gpumux_end(request);
}

static inline int gpumux_advise_if_there(uint64_t address, uint64_t bytes, int advice)
{
    return gpumux_advise ? gpumux_advise(address, bytes, advice) : GPUMUX_UNKNOWN;
}

static inline int gpumux_on_reclaim_if_there(gpumux_reclaim function, void *user)
{
    return gpumux_on_reclaim ? gpumux_on_reclaim(function, user) : -1;
}

#ifdef __cplusplus
}
#endif

#endif
