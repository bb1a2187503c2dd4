# Fills memcached to its limit with values of another size in each turn, then flushes it.
import signal, socket, subprocess, time
from driver import LIMIT, check_preload, enter_until_end, report, wait_until

SIZES = [64, 200, 1000, 4000, 300, 8000]
# Bytes of an item beside its value.
BESIDE, PIPELINE, REQUESTS = 60, 64, 500


class Lost(Exception):
    pass


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


port = free_port()
command = ['memcached', '-u', 'nobody', '-l', '127.0.0.1', '-p', str(port), '-m', str(LIMIT * 4 // 5 >> 20)]
server = subprocess.Popen(command, preexec_fn=enter_until_end, stdin=subprocess.DEVNULL)
connection = None


def connects():
    global connection
    try:
        connection = socket.create_connection(('127.0.0.1', port), 60)
    except ConnectionRefusedError:
        return False
    return True


def request(lines):
    """Sends requests, and reads a line for each. Returns whether all had memory."""
    text = b''
    try:
        connection.sendall(b''.join(lines))
        while text.count(b'\r\n') < len(lines):
            more = connection.recv(1 << 16)
            if not more:
                raise Lost
            text += more
    except OSError:
        raise Lost
    return b'out of memory' not in text


def turn(size):
    """Fills and flushes. Returns the slowest single request, and whether all had memory."""
    stores = lambda key: b'set key:%d 0 0 %d\r\n%s\r\n' % (key, size, b'v' * size)
    keys, slowest, had_memory = LIMIT * 4 // 5 // (size + BESIDE), 0.0, True
    for first in range(0, keys, PIPELINE):
        had_memory &= request([stores(key) for key in range(first, min(first + PIPELINE, keys))])
    for key in range(REQUESTS):
        began = time.monotonic()
        had_memory &= request([stores(key)])
        slowest = max(slowest, time.monotonic() - began)
    request([b'flush_all\r\n'])
    return slowest, had_memory


wait_until(connects)
check_preload(server.pid)
turns, end = [], None
try:
    turns = [turn(size) for size in SIZES]
    server.terminate()
except Lost:
    end = 'refused'
if server.wait() == -signal.SIGKILL:
    end = 'killed'
elif not all(had_memory for _, had_memory in turns):
    end = 'refused'
report(end, max((slowest for slowest, _ in turns), default=0))
