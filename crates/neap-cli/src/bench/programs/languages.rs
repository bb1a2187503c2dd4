//! Programs in Python, Lua and Ruby, which allocate all objects, or all larger ones, by malloc.
//!
//! # Design
//!
//! Each script prints sums and counts that depend on all of its objects. The benchmark switches
//! Python's own allocator of small objects off.

use std::process::Command;

use anyhow::Result;

use super::scratch::Scratch;
use super::{Method, Program, tool};

pub(super) fn programs() -> Vec<Program> {
    let through = Method::Through;
    vec![
        Program { name: "python-lists", needs: &["python3"], prepare: prepare_lists, run: through(lists) },
        Program { name: "lua", needs: &["lua5.4"], prepare: prepare_lua, run: through(lua) },
        Program { name: "ruby", needs: &["ruby"], prepare: prepare_ruby, run: through(ruby) },
    ]
}

const LISTS: &str = "\
import sys
count = int(sys.argv[1])
lists = {key: [key, key * 7919 % count] for key in range(count)}
order = sorted(lists, key=lambda key: lists[key][1])
print(len(order), order[:3], sum(lists[key][0] for key in order[::1000]))
del lists, order
places = count // 3
entries = {}
for key in range(2 * count):
    entries[key * 7919 % places] = (key, key + 1, str(key))
print(len(entries), sum(len(entry[2]) for entry in entries.values()))
";

fn prepare_lists(scratch: &Scratch) -> Result<()> {
    scratch.file("lists.py", |file| file.write_all(LISTS.as_bytes()))
}

fn lists(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "python3")?;
    command.arg("lists.py").arg(scratch.amount(1_500_000).to_string());
    command.env("PYTHONMALLOC", "malloc").env("PYTHONHASHSEED", "0");
    Ok(command)
}

const TREES: &str = "\
local depth, count = tonumber(arg[1]), tonumber(arg[2])
local function tree(depth)
  if depth == 0 then return {} end
  return { tree(depth - 1), tree(depth - 1) }
end
local function nodes(tree)
  if not tree[1] then return 1 end
  return 1 + nodes(tree[1]) + nodes(tree[2])
end
local sum = 0
for number = 1, 12 do sum = sum + nodes(tree(depth)) end
print(sum)
local strings, length = {}, 0
for number = 1, count do strings[number] = 'entry-' .. number * 7919 % count .. ('x'):rep(number % 60) end
table.sort(strings)
for number = 1, count do length = length + #strings[number] end
print(#strings, length, strings[1], strings[count])
";

fn prepare_lua(scratch: &Scratch) -> Result<()> {
    scratch.file("trees.lua", |file| file.write_all(TREES.as_bytes()))
}

fn lua(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "lua5.4")?;
    let depth = if scratch.quick { "13" } else { "16" };
    command.args(["trees.lua", depth]).arg(scratch.amount(600_000).to_string()).env_remove("LUA_INIT");
    Ok(command)
}

const ENTRIES: &str = "\
count = Integer(ARGV[0])
entries = (0...count).map do |key|
  { id: key, name: \"entry-#{key * 7919 % count}\" + 'x' * (key % 90), tags: [key % 7, key % 11, key.to_s] }
end
groups = entries.group_by { |entry| entry[:tags][0, 2] }
groups.sort.each { |tags, list| puts \"#{tags.inspect} #{list.size} #{list.sum { |entry| entry[:name].size }}\" }
sorted = entries.sort_by { |entry| [entry[:name], entry[:id]] }
words = sorted.map { |entry| entry[:name].sub(/x+$/) { |tail| tail.size.to_s }.split('-') }
puts sorted.size, words.flatten.uniq.size, words.last.inspect
text = +''
sorted.each { |entry| text << entry[:name] << \"\\n\" }
puts text.size, text.lines.sum(&:size)
";

fn prepare_ruby(scratch: &Scratch) -> Result<()> {
    scratch.file("entries.rb", |file| file.write_all(ENTRIES.as_bytes()))
}

fn ruby(scratch: &Scratch) -> Result<Command> {
    let mut command = tool(scratch, "ruby")?;
    command.args(["--disable-gems", "entries.rb"]).arg(scratch.amount(200_000).to_string()).env_remove("RUBYOPT");
    Ok(command)
}
