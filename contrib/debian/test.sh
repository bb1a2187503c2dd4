#!/bin/sh
# Installs, uses and purges the packages of /tmp/packages in a fresh root, as its root user. At the
# end it makes /tmp/passed. `cargo xtask deb --test` makes the root and runs this script there.
set -eu
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 MANPAGER=cat

# Files of packages; caches and logs of the package tools change with every package.
files() { find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /var/cache \
    -o -path /var/log -o -path /var/lib/apt -o -path /var/lib/dpkg \) -prune -o -print | sort; }
# A command that prints a text. Its whole output is read, so it does not end by a closed pipe.
says() { text=$1; shift; "$@" >/tmp/said 2>&1 || { cat /tmp/said; exit 1; }
    grep -q -- "$text" /tmp/said || { echo "\`$*\` does not print $text:"; cat /tmp/said; exit 1; }; }

files >/tmp/before
apt-get install -qq -y --no-install-recommends /tmp/packages/*.deb >/tmp/log 2>&1 || { cat /tmp/log; exit 1; }

says '| neap  ' neap demo
says 'neap run' man neap
says 'Examples' neap --help
says 'EXAMPLES' man neap-stat
says '/libneap_malloc.so.0' neap run -- cat /proc/self/maps
says '/libneap_malloc.so.0' env LD_PRELOAD=libneap_malloc.so.0 cat /proc/self/maps
says '/libneap_mallctl.so.0' env LD_PRELOAD='libneap_malloc.so.0 libneap_mallctl.so.0' cat /proc/self/maps
bash -euc '. /usr/share/bash-completion/completions/neap; complete -p neap' >/dev/null
for file in include/neap.h lib/x86_64-linux-gnu/libneap.so lib/x86_64-linux-gnu/pkgconfig/neap.pc \
    lib/x86_64-linux-gnu/cmake/neap/neap-config.cmake share/doc/neap/copyright; do
    test -s "/usr/$file" || { echo "/usr/$file is not there"; exit 1; }
done

apt-get purge -qq -y neap libneap0 libneap-dev >/tmp/log 2>&1 || { cat /tmp/log; exit 1; }
files >/tmp/after
diff /tmp/before /tmp/after || { echo "purge left these files"; exit 1; }
if dpkg -l 'libneap*' neap 2>/dev/null | grep '^[^u]n\|^rc'; then echo "dpkg still has a package"; exit 1; fi
touch /tmp/passed
