# What drivers of servers share. Arguments: bytes of the container's limit, and the file through
# which the server enters it.
import ctypes, os, signal, sys, time

LIMIT, GROUP = int(sys.argv[1]), sys.argv[2]


def enter():
    """Enters the container, between fork and exec."""
    with open(GROUP, 'w') as file:
        file.write('0')


def end_with_driver():
    """Has the kernel end the server with this script; a change of the user forgets it."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_until_end():
    enter()
    end_with_driver()


def wait_until(works):
    """Waits until a server works."""
    for _ in range(1000):
        if works():
            return
        time.sleep(0.02)
    sys.exit('the server does not answer')


def check_preload(server):
    """Fails if a server does not run on the library that it was given."""
    library = os.environ.get('LD_PRELOAD', '')
    with open(f'/proc/{server}/maps') as maps:
        if library not in maps.read():
            sys.exit(f'the server did not load {library}')


def report(end, slowest):
    """Ends with a line: killed, refused, or survived with the slowest request in seconds."""
    print(end or f'survived {slowest * 1000}')
