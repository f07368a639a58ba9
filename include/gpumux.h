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

/*
 * Adds to what the program has done, in a unit of its own: tokens, samples, steps. Once it is used, scaling profiles and `gpumux profile`
 * compare the program with itself by this, and not by the number of kernels and graphs; `gpumux ps --json` and the metrics show the sum.
 */
void gpumux_progress(uint64_t units) __attribute__((weak));

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
 * program's is moved. It is called in a thread of its own, once at a time, and may free memory as the program
 * does. No caller waits for it longer than a second. Where nothing was freed it is not called again for 5 s. Null instead of a
 * function: none is called any more; the call waits until none runs, at most two seconds. Returns 0, or -1 where that is impossible: in
 * a forked child, with more than 64 functions, when one still runs.
 */
int gpumux_on_reclaim(gpumux_reclaim function, void *user) __attribute__((weak));

/*
 * Elastic ranges: addresses that are reserved once, with memory behind the granules that the program needs now. Others get what it
 * does not need without its help, whatever its threads do. A granule without memory can be read and written; what is written there is
 * lost, and what is read is undefined.
 */

/* The states of a granule: the lowest three bits of its word. */
enum {
    GPUMUX_OUT = 0,     /* no memory */
    GPUMUX_FREE = 1,    /* memory, whose contents are not needed: others get it first */
    GPUMUX_CACHED = 2,  /* memory, whose contents the program can make anew: others get it next */
    GPUMUX_IN_USE = 3   /* memory, whose contents count: it moves to the host and back as other memory */
                        /* more: on its way to GPUMUX_OUT, or from it */
};

/* Of an elastic range, for reading. It stays readable after the range is freed. In a forked child all of it is 0. */
struct gpumux_range {
    uint64_t address;      /* 0: the range has been freed */
    uint64_t bytes;
    uint64_t granule;      /* bytes of a granule */
    uint64_t granules;     /* their number */
    uint64_t target;       /* bytes of memory that the range should keep: less than `bytes` for 10 s after others lacked room, or a commit was refused */
    uint64_t taken;        /* how many granules without a use others have taken, or other requests of the tenant */
    uint64_t taken_cached; /* those of them that were a cache */
    uint64_t moved;        /* how often a granule in use was moved to the host */
    uint32_t words[];      /* of each granule: its state, and above that how often it has lost its memory */
};

/* Answers of these functions, besides GPUMUX_DONE and GPUMUX_UNKNOWN (no such range, or no such granules). */
enum {
    GPUMUX_NOT_YET = 1,      /* no room was made in this time: less is to be used, or the call repeated */
    GPUMUX_FULL = 2,         /* beyond the tenant's limit, or what others give way for */
    GPUMUX_NO_CONTEXT = -2,  /* no context of this device is current */
    GPUMUX_NATIVE = -3,      /* memory is left to the driver here: GPUMUX_MEMORY=native, peer access, a forked child */
    GPUMUX_REFUSED = -4      /* the driver refuses */
};

/*
 * Reserves `bytes` of addresses of a device (its CUDA ordinal), whose context must be current, and stores where the range's
 * description is. `granule` is a multiple of 2 MiB, at most 64 MiB; 0: 16 MiB. All granules are without memory, but for one that is
 * mapped in place of all that are. A process has at most 4096 ranges.
 */
int gpumux_range_new(int device, uint64_t bytes, uint64_t granule, const struct gpumux_range **range) __attribute__((weak));

/*
 * A range of at least so many bytes, all in use, for allocators that are called like PyTorch's (CUDAPluggableAllocator). Returns its
 * address, or 0 where the memory is not to be had within 30 s. gpumux_range_free frees it. Where the current context is not of this device,
 * or there is none, it is of the device's primary context, which must be active.
 */
uint64_t gpumux_segment(int64_t bytes, int device, void *stream) __attribute__((weak));

/* Waits until the device has done all work, and frees a range. */
int gpumux_range_free(uint64_t address) __attribute__((weak));

/*
 * Gets memory for `count` granules from `first` on, all or none; afterwards all of them are in use. Contents of a granule that had no
 * memory are undefined. Others may have to give way, which is awaited for `wait_ms` at most. No kernel may use these
 * granules meanwhile. What is within the tenant's guarantee is there in the time that the specification says.
 */
int gpumux_commit(uint64_t address, uint64_t first, uint64_t count, unsigned wait_ms) __attribute__((weak));

/*
 * The same for ranks of one engine: processes of one tenant, or threads with a range each. Each calls it for its own granules, with the same
 * name of the request, which was not used before, and the same number of parts, at most 64. Memory is granted to all of them or to none. What
 * is granted the driver may still refuse to one: then the others decommit theirs.
 */
int gpumux_commit_part(uint64_t address, uint64_t first, uint64_t count, unsigned wait_ms, uint64_t name, unsigned parts) __attribute__((weak));

/* Gives the memory of these granules back. No kernel may be using them. */
int gpumux_decommit(uint64_t address, uint64_t first, uint64_t count) __attribute__((weak));

/*
 * Sets the state of granules: GPUMUX_FREE, GPUMUX_CACHED or GPUMUX_IN_USE. The answer is how many could not be set, since they have no
 * memory any more: contents of a cache are there if the answer to GPUMUX_IN_USE is 0. What is free or cached must not be used by
 * a kernel that is still to run.
 */
int64_t gpumux_mark(uint64_t address, uint64_t first, uint64_t count, int state) __attribute__((weak));

/*
 * Kept buffers: device memory that outlives a fault of another member of the program's MPS group, under
 * `gpumux run --restart on-collateral --keep-memory`. The program that runs again finds each buffer by its name, with the contents of
 * its last commit. A buffer takes twice its bytes, and stays on the device.
 */

/* Answers of these functions, besides those of elastic ranges. */
enum {
    GPUMUX_FOUND = 3,        /* contents are those of a commit before a fault */
    GPUMUX_NOT_KEPT = -5     /* no supervisor keeps memory: no --keep-memory, or the program is in no group */
};

/*
 * Makes the buffer of this name (1 to 128 bytes of UTF-8), or finds it, and stores its address. GPUMUX_DONE: all of it is zero, since
 * there was no commit, or one of a buffer of another size or device. GPUMUX_FOUND: `step` is stored, and the contents are those of
 * that commit. GPUMUX_UNKNOWN: a wrong size or name, or the process has this buffer. GPUMUX_NOT_YET: another process of the tenant
 * has it, or the device has no room. A context of the device (its CUDA ordinal) must be current.
 */
int gpumux_keep(const char *name, int device, uint64_t bytes, uint64_t *address, uint64_t *step) __attribute__((weak));

/*
 * Commits a buffer's contents as they are once the stream (a CUstream) has come so far; returns at once. Work that writes to the buffer must be
 * ordered before it or after it in that stream. After a fault, contents are those of the last commit that the device had done, whole.
 * Not while the stream is capturing. Commits of several buffers are independent of each other: what must be of one step
 * belongs in one buffer.
 */
int gpumux_keep_commit(uint64_t address, uint64_t step, void *stream) __attribute__((weak));

/* Waits until the device has done all work, and frees a buffer, also for the program's next start. */
int gpumux_keep_end(uint64_t address) __attribute__((weak));

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

static inline void gpumux_progress_if_there(uint64_t units)
{
    if (gpumux_progress)
        gpumux_progress(units);
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
