/* neap.h in C++17: constants are constant expressions, objects lie in classes, callbacks are
 * functions without captures. */
#include "../programs/check.h"

#include <neap.h>
#include <string>
#include <thread>
#include <vector>

static_assert(NEAP_NO_OWNER == 0 && NEAP_LARGEST == 32 * 1024 && NEAP_ROOT != 0 && NEAP_MAX == 0, "constants");

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

/* A guard of being in a group, and one of a charge, as C++ programs would write them. */
class Inside {
public:
    explicit Inside(neap_group group) { CHECK(neap_group_enter(&entered, group) == NEAP_OK, "in"); }
    ~Inside() { neap_group_leave(&entered); }
    Inside(const Inside &) = delete;
    Inside &operator=(const Inside &) = delete;

private:
    neap_entered entered{};
};

class Charge {
public:
    Charge(neap_group group, std::uint64_t bytes) {
        CHECK(neap_group_charge(&charge, group, bytes, NEAP_REFUSE, nullptr) == NEAP_OK, "room");
    }
    Charge(Charge &&other) noexcept : charge(other.charge) { other.charge = {}; }
    ~Charge() { neap_group_uncharge(&charge); }
    std::uint64_t bytes() const { return neap_charge_bytes(&charge); }

private:
    neap_charge charge{};
};

static std::uint64_t used(neap_group group) {
    std::uint64_t bytes = 0;
    CHECK(neap_group_used(group, &bytes) == NEAP_OK, "a group");
    return bytes;
}

static void groups() {
    neap_group group = 0;
    CHECK(neap_group_create("cxx/group", &group) == NEAP_OK && neap_group_set(group, NEAP_MAX, 5000, nullptr) == NEAP_OK, "a group");
    {
        std::vector<Charge> charges;
        for (int i = 0; i < 5; i++) charges.emplace_back(group, 1000);
        neap_charge more;
        CHECK(neap_group_charge(&more, group, 1, NEAP_REFUSE, nullptr) == NEAP_E_CHARGE, "the vector has moved them, and no more fit");
        CHECK(used(group) == 5000 && charges[4].bytes() == 1000, "%llu", static_cast<unsigned long long>(used(group)));
    }
    std::vector<int> *numbers = nullptr;
    {
        Inside inside(group);
        numbers = new std::vector<int>(1000);
    }
    std::uint64_t inside = used(group);
    CHECK(inside == 0 || (inside > 1000 * sizeof(int) && inside < 10000), "%llu", static_cast<unsigned long long>(inside));
    delete numbers;
    CHECK(used(group) == 0 && neap_group_delete(group) == NEAP_OK, "its end");
}

int main() {
    Counter counter(NEAP_NO_OWNER);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
        threads.emplace_back([&counter] {
            for (int round = 0; round < 10000; round++) counter += 1;
        });
    for (std::thread &thread : threads) thread.join();
    CHECK(counter.exact() == 40000, "%lld", static_cast<long long>(counter.exact()));
    neap_percpu data = 0;
    CHECK(neap_percpu_alloc(&data, NEAP_NO_OWNER, sizeof(std::uint64_t), alignof(std::uint64_t), NEAP_FOREVER) == NEAP_OK, "data");
    std::string cpus;
    auto each = [](void *copy, unsigned cpu, void *argument) {
        *static_cast<std::uint64_t *>(copy) = cpu;
        *static_cast<std::string *>(argument) += 'x';
        return 0;
    };
    CHECK(neap_percpu_each(data, each, &cpus) == 0 && cpus.size() == neap_cpus(), "%zu", cpus.size());
    CHECK(neap_percpu_free(data) == NEAP_OK, "its end");
    groups();
    return finish();
}
