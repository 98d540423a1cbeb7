/* Counts the bytes that this process holds from malloc, and the most it ever held: an oracle for the measuring of memory.
 *
 *     cc -O2 -shared -fPIC -o malloc_peak.so malloc_peak.c;  LD_PRELOAD=malloc_peak.so python ...
 *
 * It stands in for glibc's malloc family and passes every call on. Bytes are those of malloc_usable_size, so that what a free
 * takes off is what the allocation added: the size asked for, rounded up to 8 modulo 16, or to whole pages where glibc maps a
 * large block for itself. operator new and delete of libstdc++ come by here, as do glibc's own calls (strdup, fopen). What a
 * program gets from mmap directly does not: CPython's arenas for objects up to 512 bytes, thread stacks, generated code.
 *
 * glibc's functions are called by their internal names, which need no dlsym, which itself allocates.
 */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void *__libc_valloc(size_t);
extern void *__libc_pvalloc(size_t);
extern void __libc_free(void *);

static _Atomic int64_t live_bytes;
static _Atomic int64_t peak_bytes;

/* What Python calls. */

int64_t malloc_peak_live(void) { return atomic_load(&live_bytes); }

int64_t malloc_peak_peak(void) { return atomic_load(&peak_bytes); }

/* Let the peak begin anew at what is live now. */
void malloc_peak_reset(void) { atomic_store(&peak_bytes, atomic_load(&live_bytes)); }

static void *added(void *block) {
    if (block == NULL) return NULL;
    int64_t size = (int64_t)malloc_usable_size(block);
    int64_t now = atomic_fetch_add(&live_bytes, size) + size;
    int64_t peak = atomic_load(&peak_bytes);
    while (now > peak && !atomic_compare_exchange_weak(&peak_bytes, &peak, now)) {
    }
    return block;
}

void *malloc(size_t size) { return added(__libc_malloc(size)); }

void *calloc(size_t count, size_t size) { return added(__libc_calloc(count, size)); }

void free(void *block) {
    int error = errno; /* free() keeps it */
    if (block != NULL) atomic_fetch_sub(&live_bytes, (int64_t)malloc_usable_size(block));
    __libc_free(block);
    errno = error;
}

void *realloc(void *block, size_t size) {
    /* The old block and the new one are never counted at once, though both may exist while it is copied. */
    int64_t before = block == NULL ? 0 : (int64_t)malloc_usable_size(block);
    atomic_fetch_sub(&live_bytes, before);
    void *moved = __libc_realloc(block, size);
    if (moved == NULL && size != 0) atomic_fetch_add(&live_bytes, before); /* failed: the old one is still there */
    return added(moved);
}

void *reallocarray(void *block, size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(block, bytes);
}

void *memalign(size_t alignment, size_t size) { return added(__libc_memalign(alignment, size)); }

void *aligned_alloc(size_t alignment, size_t size) { return added(__libc_memalign(alignment, size)); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) != 0 || alignment == 0 || (alignment & (alignment - 1)) != 0) return EINVAL;
    int error = errno; /* posix_memalign() returns the error instead */
    void *made = added(__libc_memalign(alignment, size));
    errno = error;
    if (made == NULL) return ENOMEM;
    *block = made;
    return 0;
}

void *valloc(size_t size) { return added(__libc_valloc(size)); }

void *pvalloc(size_t size) { return added(__libc_pvalloc(size)); }
