# Hash joins of three sessions at once, with parallel workers that scan, and rows of another width in
# each turn.
import os, pwd, re, shutil, signal, subprocess, sys, time
from driver import LIMIT, check_preload, end_with_driver, enter, report, wait_until

WIDTHS = [30, 400, 100, 1500, 60, 4000]
# Bytes of a row in a hash table beside its text.
BESIDE, SESSIONS = 60, 3
DATA, ROWS = os.path.join(os.getcwd(), 'postgres'), 400_000
USER = pwd.getpwnam('nobody')
PLAIN = {'PATH': os.environ['PATH'], 'LC_ALL': 'C', 'HOME': os.getcwd()}
SETTINGS = {
    'listen_addresses': '',
    'unix_socket_directories': DATA,
    'shared_buffers': '32MB',
    'fsync': 'off',
    'autovacuum': 'off',
    'jit': 'off',
    'max_parallel_workers_per_gather': 2,
    'enable_parallel_hash': 'off',
    'enable_mergejoin': 'off',
    'parallel_setup_cost': 0,
    'parallel_tuple_cost': 0,
    'min_parallel_table_scan_size': 0,
    'work_mem': f'{LIMIT // 3 >> 10}kB',
    'hash_mem_multiplier': 1,
}


def drop_rights():
    """Becomes another user than root, between fork and exec."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(USER.pw_gid)
        os.setuid(USER.pw_uid)


def enter_without_rights():
    enter()
    drop_rights()
    end_with_driver()


def psql(query):
    command = ['psql', '-h', DATA, '-U', 'bench', '-XAqt', '-v', 'ON_ERROR_STOP=1', '-c', query, 'postgres']
    return subprocess.Popen(
        command, env=PLAIN, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def complaint(session):
    """Waits for the end of a session. Returns its complaint, or nothing."""
    _, said = session.communicate()
    return said if session.returncode else ''


def start(environment, begin):
    command = ['postgres', '-D', DATA]
    for key, value in SETTINGS.items():
        command += ['-c', f'{key}={value}']
    server = subprocess.Popen(
        command, env=environment, preexec_fn=begin, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: not complaint(psql('SELECT 1')))
    return server


def stop(server):
    server.send_signal(signal.SIGINT)
    server.wait()


def make():
    """Makes a database of one table."""
    os.mkdir(DATA, 0o700)
    if os.getuid() == 0:
        os.chown(DATA, USER.pw_uid, USER.pw_gid)
    # Systems with several versions have it beside the server alone.
    initdb = os.path.join(os.path.dirname(os.path.realpath(shutil.which('postgres'))), 'initdb')
    command = [initdb, '-D', DATA, '-U', 'bench', '--auth=trust', '--no-sync']
    subprocess.run(command, env=PLAIN, preexec_fn=drop_rights, check=True, stdout=subprocess.DEVNULL)
    server = start(PLAIN, drop_rights)
    table = f'CREATE TABLE rows AS SELECT g AS k FROM generate_series(1, {ROWS}) g; ANALYZE rows'
    failed = complaint(psql(table)) or complaint(psql('CHECKPOINT'))
    stop(server)
    if failed:
        sys.exit(failed)


def join(width):
    """Joins rows of a width. Returns the end of the server or a query, if it is not a result."""
    # Four fifths of the limit in all hash tables together.
    built = min(ROWS, LIMIT * 4 // 5 // SESSIONS // (width + BESIDE))
    query = (
        'SELECT count(b.text) FROM rows a JOIN '
        f"(SELECT k, repeat('x', {width}) AS text FROM rows WHERE k <= {built} OFFSET 0) b USING (k)"
    )
    complaints = ''.join([complaint(session) for session in [psql(query) for _ in range(SESSIONS)]])
    if not complaints:
        return None
    is_refused = re.search('out of memory|cannot allocate', complaints, re.IGNORECASE)
    return 'refused' if is_refused else 'killed'


if not os.path.exists(DATA):
    make()
server = start(dict(os.environ), enter_without_rights)
check_preload(server.pid)
slowest, end = 0.0, None
for width in WIDTHS:
    began = time.monotonic()
    end = join(width)
    if end:
        break
    slowest = max(slowest, time.monotonic() - began)
stop(server)
report(end, slowest)
