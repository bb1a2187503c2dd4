# A parent with a table forks workers that build and drop dictionaries, of entries of other sizes
# in each turn. Arguments: bytes of the container's limit.
import os, sys, time

limit = int(sys.argv[1])
WORKERS, SIZES = 4, [30, 400, 100, 1500, 60, 4000]
# Bytes of an entry beside its value's text.
BESIDE = 250
table = {key: 'v' * 100 for key in range(limit // 5 // 350)}


def build(size):
    return len({key: str(key) + 'v' * size for key in range(limit * 3 // 20 // (size + BESIDE))})


def serve(tasks, results):
    while True:
        line = tasks.readline()
        if not line:
            os._exit(0)
        try:
            build(int(line))
        except MemoryError:
            os._exit(3)
        results.write(b'done\n')
        results.flush()


workers = []
for _ in range(WORKERS):
    (task_in, task_out), (result_in, result_out) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(task_out)
        for _, other, _ in workers:
            other.close()
        serve(os.fdopen(task_in, 'rb'), os.fdopen(result_out, 'wb'))
    os.close(task_in)
    os.close(result_out)
    workers.append((pid, os.fdopen(task_out, 'wb'), os.fdopen(result_in, 'rb')))

slowest, lost = 0.0, False
for size in SIZES:
    began = time.monotonic()
    try:
        for _, tasks, _ in workers:
            tasks.write(b'%d\n' % size)
            tasks.flush()
    except BrokenPipeError:
        lost = True
    lost = lost or any(not results.readline() for _, _, results in workers)
    if lost:
        break
    slowest = max(slowest, time.monotonic() - began)
for _, tasks, _ in workers:
    try:
        tasks.close()
    except BrokenPipeError:
        pass
ends = [os.waitpid(pid, 0)[1] for pid, _, _ in workers]
if any(os.WIFSIGNALED(end) and os.WTERMSIG(end) == 9 for end in ends):
    print('killed')
elif any(ends):
    print('refused')
else:
    print('survived', slowest * 1000)
