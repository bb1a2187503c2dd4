// A program that is linked with a library that has its own operator new and delete, as allocators
// do: all of them must come from one library.
#include "check.h"

#include <map>
#include <new>
#include <string>

int main() {
    std::map<int, std::string> words;
    for (int i = 0; i < 2000; i++) words[i] = std::string(i, 'x');
    for (int i = 0; i < 2000; i += 2) words.erase(i);
    for (const auto &[number, word] : words) CHECK(word.size() == (std::size_t)number, "word %d", number);
    for (std::size_t size = 1; size < 100000; size = size * 2 + 1) {
        void *memory[] = {::operator new(size), ::operator new[](size), ::operator new(size, std::nothrow),
                          ::operator new[](size, std::nothrow)};
        for (int i = 0; i < 4; i++) fill(memory[i], size, i);
        for (int i = 0; i < 4; i++) CHECK(differs(memory[i], size, i) == size, "%zu bytes by form %d", size, i);
        ::operator delete(memory[0]);
        ::operator delete[](memory[1]);
        ::operator delete(memory[2], size);
        ::operator delete[](memory[3], size);
    }
    return finish();
}
