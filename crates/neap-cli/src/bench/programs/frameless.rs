//! A C++ program that is compiled without frame pointers, for `neap bench profile`.
//!
//! # Design
//!
//! The program is compiled here by `c++ -O2 -fomit-frame-pointer`. It allocates in templates of the
//! standard library, in virtual functions, in a recursion, in a comparison that `std::sort` calls,
//! while an exception is caught, and in threads. A profiler can follow its stacks by unwind
//! information only.

use std::process::Command;

use anyhow::{Result, ensure};

use super::scratch::Scratch;
use super::{Method, Program, tool};

pub(in crate::bench) fn program() -> Program {
    Program { name: "c++", needs: &["c++"], prepare, run: Method::Through(command) }
}

const SOURCE: &str = r#"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

struct Drawn {
    virtual ~Drawn() = default;
    virtual std::string name(size_t number) const = 0;
};
struct Square : Drawn {
    std::string name(size_t number) const override { return std::string(100 + number % 900, 's'); }
};
struct Circle : Drawn {
    std::string name(size_t number) const override { return "a circle of the number " + std::to_string(number); }
};

struct Branch {
    std::unique_ptr<Branch> left, right;
    std::vector<size_t> values;
};

static std::unique_ptr<Branch> tree(size_t depth) {
    auto node = std::make_unique<Branch>();
    node->values.assign(10 + depth * 20, depth);
    if (depth > 0) {
        node->left = tree(depth - 1);
        node->right = tree(depth - 1);
    }
    return node;
}

static size_t nodes(const Branch *node) { return node ? 1 + nodes(node->left.get()) + nodes(node->right.get()) : 0; }

static size_t fail(size_t number) {
    std::vector<char> kept(2000 + number % 1000);
    if (number % 2 == 0) throw std::runtime_error(std::string(1500, 'x'));
    return kept.size();
}

static size_t work(size_t count) {
    std::vector<std::unique_ptr<Drawn>> shapes;
    std::map<std::string, size_t> names;
    std::unordered_map<size_t, std::vector<std::string>> groups;
    size_t sum = 0;
    for (size_t number = 0; number < count; number++) {
        if (number % 2) shapes.push_back(std::make_unique<Square>()); else shapes.push_back(std::make_unique<Circle>());
        std::string name = shapes.back()->name(number * 7919);
        groups[number % 1000].push_back(name);
        names[std::move(name)] += number;
        try {
            sum += fail(number);
        } catch (const std::runtime_error &error) {
            sum += std::string(error.what()).size();
        }
    }
    std::vector<size_t> order(count);
    for (size_t number = 0; number < count; number++) order[number] = number * 7919 % count;
    std::sort(order.begin(), order.end(), [](size_t one, size_t other) {
        return std::string(40 + one % 2, 'k') + std::to_string(one) < std::string(40 + other % 2, 'k') + std::to_string(other);
    });
    return sum + names.size() + groups.size() + order[0];
}

int main(int, char **arguments) {
    size_t count = strtoul(arguments[1], nullptr, 10), sums[3] = {};
    std::thread one([&] { sums[0] = work(count); }), other([&] { sums[1] = nodes(tree(15).get()); });
    sums[2] = work(count);
    one.join();
    other.join();
    printf("%zu %zu %zu\n", sums[0], sums[1], sums[2]);
}
"#;

fn prepare(scratch: &Scratch) -> Result<()> {
    scratch.file("frameless.cpp", |file| file.write_all(SOURCE.as_bytes()))?;
    let mut compiler = tool(scratch, "c++")?;
    compiler.args(["-O2", "-fomit-frame-pointer", "-pthread", "-o", "frameless", "frameless.cpp"]);
    ensure!(compiler.status()?.success(), "c++ cannot compile it");
    Ok(())
}

fn command(scratch: &Scratch) -> Result<Command> {
    let mut command = Command::new(scratch.folder().join("frameless"));
    command.current_dir(scratch.folder()).arg(scratch.amount(100_000).to_string());
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_without_frame_pointers_allocates_in_threads_and_ends() {
        let scratch = Scratch::new(true).unwrap();
        if scratch.tool("c++").is_err() {
            eprintln!("skipped: there is no c++");
            return;
        }
        prepare(&scratch).unwrap();
        let output = command(&scratch).unwrap().output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let numbers: Vec<&str> = text.split_whitespace().collect();
        assert!(output.status.success() && numbers.len() == 3 && numbers[0] == numbers[2], "{text}");
        assert_eq!(numbers[1], "65535");
    }
}
