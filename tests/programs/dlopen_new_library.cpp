// The plugin of dlopen_new.c.
#include <cstddef>
#include <cstdint>
#include <new>

// The compiler may remove unused allocations.
static void *volatile seen;

template <typename Take> static bool throws(Take take) {
    try {
        seen = take();
    } catch (const std::bad_alloc &) {
        return true;
    }
    return false;
}

// A bit for each form that returned memory that cannot exist, or failed in a wrong way.
extern "C" int forms_that_do_not_fail() {
    volatile std::size_t huge = PTRDIFF_MAX;
    std::align_val_t by{256};
    return !throws([&] { return ::operator new(huge); }) | !throws([&] { return ::operator new[](huge); }) << 1 |
           !throws([&] { return ::operator new(huge, by); }) << 2 | !throws([&] { return ::operator new[](huge, by); }) << 3 |
           !!::operator new(huge, std::nothrow) << 4 | !!::operator new[](huge, std::nothrow) << 5 |
           !!::operator new(huge, by, std::nothrow) << 6 | !!::operator new[](huge, by, std::nothrow) << 7;
}
