// Operators with memory of their own, which never call malloc or free. No memory is reused.
#include <cstdlib>
#include <new>

static char memory[512 << 20];
static std::size_t used;

void *operator new(std::size_t size) {
    std::size_t at = __atomic_fetch_add(&used, (size + 15) / 16 * 16, __ATOMIC_RELAXED);
    if (at + size > sizeof memory) throw std::bad_alloc();
    return memory + at;
}

void operator delete(void *object) noexcept {
    if (object && ((char *)object < memory || (char *)object >= memory + sizeof memory)) abort();
}

void operator delete(void *object, std::size_t) noexcept { operator delete(object); }
