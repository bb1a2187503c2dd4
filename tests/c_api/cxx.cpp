/* neap.h in C++17: constants are constants, objects lie in classes, callbacks are functions without captures. */
#include "../programs/check.h"

#include <neap.h>
#include <string>
#include <thread>
#include <vector>

static_assert(NEAP_NOBODY == 0 && NEAP_LARGEST == 32 * 1024, "constants");

class Counter {
public:
    explicit Counter(neap_owner owner) { CHECK(neap_counter_init(&counter, owner, 16, NEAP_FOREVER) == NEAP_OK, "a counter"); }
    ~Counter() { neap_counter_destroy(&counter); }
    Counter(const Counter &) = delete;
    Counter &operator=(const Counter &) = delete;
    void operator+=(std::int64_t value) { neap_counter_add(&counter, value); }
    std::int64_t exact() const { return neap_counter_exact(&counter); }

private:
    neap_counter counter{};
};

int main() {
    Counter counter(NEAP_NOBODY);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
        threads.emplace_back([&counter] {
            for (int round = 0; round < 10000; round++) counter += 1;
        });
    for (std::thread &thread : threads) thread.join();
    CHECK(counter.exact() == 40000, "%lld", static_cast<long long>(counter.exact()));
    neap_percpu data = 0;
    CHECK(neap_percpu_alloc(&data, NEAP_NOBODY, sizeof(std::uint64_t), alignof(std::uint64_t), NEAP_FOREVER) == NEAP_OK, "data");
    std::string cpus;
    auto each = [](void *copy, unsigned cpu, void *argument) {
        *static_cast<std::uint64_t *>(copy) = cpu;
        *static_cast<std::string *>(argument) += 'x';
        return 0;
    };
    CHECK(neap_percpu_each(data, each, &cpus) == 0 && cpus.size() == neap_cpus(), "%zu", cpus.size());
    CHECK(neap_percpu_free(data) == NEAP_OK, "its end");
    return finish();
}
