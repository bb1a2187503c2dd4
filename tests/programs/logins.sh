# Logs in to an OpenSSH server of its own on loopback, LOGINS times (20), with a key made for it, in
# the current folder. The server's children drop their privileges in a sandbox that ends them at
# unnecessary system calls.
set -u
logins=${LOGINS:-20}
[ "$(id -u)" = 0 ] || { echo "only root's sshd has a sandboxed child for each login" >&2; exit 77; }
sshd=$(command -v sshd) || { echo "sshd is not on PATH" >&2; exit 77; }
here=$PWD
mkdir -p /run/sshd
ssh-keygen -q -t ed25519 -N '' -f host_key && ssh-keygen -q -t ed25519 -N '' -f user_key || exit 1
cp user_key.pub authorized_keys
chmod 600 authorized_keys
cat >sshd_config <<END
ListenAddress 127.0.0.1
HostKey $here/host_key
AuthorizedKeysFile $here/authorized_keys
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
MaxStartups 100
END
options="-F none -i user_key -o IdentitiesOnly=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o BatchMode=yes"
# A free port: the server reports ports on which it could not listen.
for attempt in 1 2 3 4 5 6 7 8; do
    port=$((20000 + (RANDOM * 32768 + RANDOM) % 30000))
    "$sshd" -D -e -f "$here/sshd_config" -p "$port" 2>log &
    server=$!
    for wait in $(seq 100); do
        grep -q 'Server listening' log && break 2
        kill -0 "$server" 2>/dev/null || break
        sleep 0.05
    done
    kill "$server" 2>/dev/null
    server=
done
[ -n "$server" ] || { cat log >&2; exit 1; }
trap 'kill "$server"' EXIT
# The client is not preloaded: only the server is tested.
unset LD_PRELOAD NEAP
succeeded=0
for number in $(seq "$logins"); do
    [ "$(ssh $options -p "$port" root@127.0.0.1 echo in 2>>log)" = in ] && succeeded=$((succeeded + 1))
done
[ "$succeeded" = "$logins" ] || cat log >&2
echo "$succeeded of $logins logins"
