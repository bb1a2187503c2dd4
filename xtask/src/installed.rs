//! Real programs that a machine may have, and the task of each under the preload library, for
//! smoke.rs. Each has the same output in every run: no times, no addresses, no order of threads.
//! The files that it needs are laid out in an empty folder first.

/// Status of a program that found a part of itself missing, which it names on standard error
/// (automake's convention).
pub(crate) const NOT_ALL_THERE: i32 = 77;

/// A real program: its name, what must be on `PATH`, files laid out before, and the command line.
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) needs: &'static [&'static str],
    pub(crate) files: &'static [(&'static str, &'static str)],
    pub(crate) line: &'static [&'static str],
}

const BASH_LOOP: &str =
    "s=0; for i in $(seq 2000); do s=$((s + i)); a[i]=$s; done; echo ${#a[@]} ${a[1234]} $(echo x | tr x y)";

const PYTHON_THREADS: &str = "\
import threading
total = [0] * 8
def work(n):
    d = {}
    for i in range(20000):
        d[str(i)] = [i] * (i % 7)
    total[n] = sum(len(v) for v in d.values())
ts = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in ts]
[t.join() for t in ts]
print(total)
";

const PYTHON_FORK: &str = "\
import os, threading
stop = threading.Event()
def churn():
    while not stop.is_set():
        x = [bytes(n) for n in range(0, 4000, 16)]
ts = [threading.Thread(target=churn) for _ in range(4)]
[t.start() for t in ts]
codes = []
for i in range(20):
    pid = os.fork()
    if pid == 0:
        y = {k: str(k) * 3 for k in range(5000)}
        os._exit(len(y) % 251)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.set()
[t.join() for t in ts]
print(codes)
";

/// Python warns when a process with several threads forks. So one thread must be left after a
/// burst.
const PYTHON_POOL: &str = "\
import multiprocessing, os, warnings
warnings.simplefilter('error')
def work(n):
    return sum(len(str(k) * 3) for k in range(n))
blocks = [bytes(100000) for _ in range(1000)]
del blocks
print(len(os.listdir('/proc/self/task')), 'thread')
with multiprocessing.get_context('fork').Pool(4) as pool:
    print(pool.map(work, range(0, 20000, 1000)))
";

/// The extensions that the distribution loads by default are opened with `RTLD_DEEPBIND`.
const PHP: &str = r#"<?php
$names = get_loaded_extensions();
sort($names);
echo implode(' ', $names), "\n";
$rows = array_map(fn($n) => ['n' => $n, 'text' => str_repeat("ab$n", $n % 50)], range(1, 20000));
usort($rows, fn($a, $b) => [$b['text'], $a['n']] <=> [$a['text'], $b['n']]);
$json = json_encode($rows);
echo md5($json), ' ', count(json_decode($json)), ' ', preg_match_all('/ab\d+/', $json), "\n";
if (function_exists('gzcompress')) {
    echo strlen(gzuncompress(gzcompress($json))), "\n";
}
if (function_exists('iconv')) {
    echo strlen(iconv('UTF-8', 'UTF-16LE', $json)), "\n";
}
if (extension_loaded('sodium')) {
    echo bin2hex(sodium_crypto_generichash($json)), "\n";
}
if (extension_loaded('openssl')) {
    echo hash('sha256', openssl_encrypt($json, 'aes-128-ctr', 'key', 0, str_repeat("\0", 16))), "\n";
}
if (extension_loaded('fileinfo')) {
    echo (new finfo(FILEINFO_MIME_TYPE))->buffer($json), "\n";
}
"#;

const PYTHON_SUBPROCESS: &str = "\
import subprocess, sys
from concurrent.futures import ThreadPoolExecutor
def child(n):
    code = 'import sys; print(sum(len(str(i)) for i in range(int(sys.argv[1]))))'
    return subprocess.run([sys.executable, '-c', code, str(n)], capture_output=True, text=True).stdout
with ThreadPoolExecutor(4) as pool:
    print(list(pool.map(child, range(1000, 9000, 1000))))
print(subprocess.check_output('echo shell', shell=True))
";

/// A part of CPython's own test suite that takes seconds; the rest by hand: `neap run -- python3 -m
/// test`.
const PYTHON_TESTS: &str = "\
python3 -c 'import test.test_thread' 2>&- || { echo 'the test suite of python3 is not installed' >&2; exit 77; }
python3 -m test -q test_thread test_fork1 test_gc test_json >log 2>&1 && echo passed || { cat log >&2; exit 1; }
";

const REDIS: &str = "\
redis-server --port 0 --unixsocket $PWD/s --save '' --daemonize no >log 2>&1 &
for i in $(seq 100); do [ -S s ] && break; sleep 0.1; done
redis-benchmark -s $PWD/s -q -n 20000 -P 16 -r 5000 -d 200 -t set,get,lpush,lrange_100,zadd,hset >bench 2>&1 || { cat bench log >&2; exit 1; }
redis-cli -s $PWD/s ping
redis-cli -s $PWD/s flushall; redis-cli -s $PWD/s dbsize; redis-cli -s $PWD/s shutdown nosave; wait
";

const HELLO_C: &str = "\
#include <stdio.h>
#include <stdlib.h>
int main(void) { char *p = malloc(100); sprintf(p, \"%d\", 42); puts(p); free(p); return 3; }
";

const HELLO_RS: &str = "\
use std::collections::BTreeMap;
fn main() {
    let m: BTreeMap<u32, String> = (0..1000).map(|i| (i, i.to_string())).collect();
    let t: Vec<_> = (0..4).map(|n| std::thread::spawn(move || vec![n; 1000].len())).collect();
    println!(\"{} {}\", m.len(), t.into_iter().map(|t| t.join().unwrap()).sum::<usize>());
}
";

const HELLO_JAVA: &str = "\
import java.util.*;
import java.util.stream.*;
class Hello {
    public static void main(String[] a) throws Exception {
        Map<Integer, String> m = new TreeMap<>();
        IntStream.range(0, 20000).forEach(i -> m.put(i, Integer.toString(i)));
        System.out.println(m.size() + \" \" + IntStream.range(0, 100000).parallel().sum());
        System.out.println(new ProcessBuilder(\"true\").start().waitFor());
    }
}
";

const GIT: &str = "\
export HOME=$PWD GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_DATE='1700000000 +0000' GIT_COMMITTER_DATE='1700000000 +0000'
export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e
git init -q -b main . && for i in $(seq 50); do seq $i 200 > f$i; done && git add f* && git commit -q -m one &&
seq 500 > f1 && git commit -q -a -m two && git log --stat --format='%H %s' && git diff HEAD~1 | wc && git gc -q && git fsck --full";

const SQL: &str = "\
create table t(a integer primary key, b text);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 20000) insert into t select i, 'row ' || i from n;
create index tb on t(b);
delete from t where a % 3 = 0;
select count(*), sum(length(b)), max(b) from t;
select group_concat(b) from (select b from t order by b desc limit 10);
";

/// Those that take longest come first.
pub(crate) const INSTALLED: &[Program] = &[
    Program { name: "python's own tests", needs: &["python3"], files: &[], line: &["bash", "-c", PYTHON_TESTS] },
    Program {
        name: "sshd logins",
        needs: &["sshd", "ssh", "ssh-keygen"],
        files: &[("logins.sh", include_str!("../../tests/programs/logins.sh"))],
        line: &["bash", "logins.sh"],
    },
    Program {
        name: "ls",
        needs: &["ls"],
        files: &[],
        line: &["ls", "-lR", "--time-style=+", "/usr/share/doc/bash", "/etc/apt"],
    },
    Program { name: "bash", needs: &["bash"], files: &[], line: &["bash", "-c", BASH_LOOP] },
    Program {
        name: "sort",
        needs: &["sort"],
        files: &[],
        line: &["bash", "-c", "seq 200000 | sort --parallel=4 -S 8M -r | md5sum"],
    },
    Program { name: "python threads", needs: &["python3"], files: &[], line: &["python3", "-c", PYTHON_THREADS] },
    Program {
        name: "python on malloc",
        needs: &["python3"],
        files: &[],
        line: &["env", "PYTHONMALLOC=malloc", "python3", "-c", PYTHON_THREADS],
    },
    Program { name: "python fork", needs: &["python3"], files: &[], line: &["python3", "-c", PYTHON_FORK] },
    Program { name: "python pool", needs: &["python3"], files: &[], line: &["python3", "-c", PYTHON_POOL] },
    Program { name: "python subprocess", needs: &["python3"], files: &[], line: &["python3", "-c", PYTHON_SUBPROCESS] },
    Program {
        name: "gcc",
        needs: &["gcc"],
        files: &[("hello.c", HELLO_C)],
        line: &["bash", "-c", "gcc -O2 -o hello hello.c && ./hello"],
    },
    Program { name: "php", needs: &["php"], files: &[("script.php", PHP)], line: &["php", "script.php"] },
    Program { name: "git", needs: &["git"], files: &[], line: &["bash", "-c", GIT] },
    Program { name: "sqlite3", needs: &["sqlite3"], files: &[], line: &["sqlite3", "t.db", SQL] },
    Program {
        name: "rustc",
        needs: &["rustc"],
        files: &[("hello.rs", HELLO_RS)],
        line: &["bash", "-c", "rustc -O hello.rs && ./hello"],
    },
    Program {
        name: "node",
        needs: &["node"],
        files: &[],
        line: &[
            "node",
            "-e",
            "const m = new Map(); for (let i = 0; i < 1e5; i++) m.set('k' + i, [i]); require('zlib').gzip(Buffer.alloc(1e6, 'ab'), (e, b) => console.log(m.size, b.length, JSON.stringify([...m].slice(0, 3))))",
        ],
    },
    Program {
        name: "java",
        needs: &["java", "javac"],
        files: &[("Hello.java", HELLO_JAVA)],
        line: &["bash", "-c", "javac Hello.java && java Hello"],
    },
    Program {
        name: "valgrind",
        needs: &["valgrind"],
        files: &[],
        line: &["valgrind", "-q", "--tool=none", "sort", "/etc/passwd"],
    },
    Program { name: "redis", needs: &["redis-server", "redis-benchmark"], files: &[], line: &["bash", "-c", REDIS] },
    Program {
        name: "stress-ng",
        needs: &["stress-ng"],
        files: &[],
        line: &[
            "bash",
            "-c",
            "stress-ng -q --malloc 4 --malloc-ops 200000 --malloc-bytes 8M --verify && echo verified",
        ],
    },
];
