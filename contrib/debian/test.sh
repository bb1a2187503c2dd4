#!/bin/sh
# Installs, uses and purges the packages of /tmp/packages in a fresh root, as its root user. Then
# builds the programs of /tmp/sources with the installed development files. At the end it makes
# /tmp/passed. `cargo xtask deb --test` makes the root and runs this script there.
set -eu
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 MANPAGER=cat
# fish writes its own files into the home folder.
export HOME=/tmp/home
mkdir -p "$HOME"

# Files of packages; caches and logs of the package tools change with every package.
files() { find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /var/cache \
    -o -path /var/log -o -path /var/lib/apt -o -path /var/lib/dpkg \) -prune -o -print | sort; }
step() { echo "$(date +%T) $*"; }
# A command whose output is shown if it fails.
quietly() { "$@" >/tmp/said 2>&1 || { echo "\`$*\` failed:"; cat /tmp/said; exit 1; }; }
# A command that prints a text. Its whole output is read, so it does not end by a closed pipe.
says() { text=$1; shift; quietly timeout 120 "$@"
    grep -q -- "$text" /tmp/said || { echo "\`$*\` does not print $text:"; cat /tmp/said; exit 1; }; }
install() { quietly apt-get install -qq -y --no-install-recommends "$@"; }

files >/tmp/before
step install
install /tmp/packages/*.deb

step use
says '| neap  ' neap demo
says 'neap run' man neap
says 'Examples' neap --help
says 'EXAMPLES' man neap-stat
says '/libneap_malloc.so.0' neap run -- cat /proc/self/maps
says '/libneap_malloc.so.0' env LD_PRELOAD=libneap_malloc.so.0 cat /proc/self/maps
says '/libneap_mallctl.so.0' env LD_PRELOAD='libneap_malloc.so.0 libneap_mallctl.so.0' cat /proc/self/maps
says 'complete .*_neap' bash -euc '. /usr/share/bash-completion/completions/neap; complete -p neap'
# shellcheck disable=SC2016
says '^loaded _neap$' zsh -fc 'autoload -U compinit; compinit -u -D; autoload +X $_comps[neap]; print loaded $_comps[neap]'
says '^demo' fish -c 'complete -C "neap d"'

step purge
quietly apt-get purge -qq -y neap libneap0 libneap-dev
files >/tmp/after
diff /tmp/before /tmp/after || { echo "purge left these files"; exit 1; }
if dpkg -l 'libneap*' neap 2>/dev/null | grep '^[^u]n\|^rc'; then echo "dpkg still has a package"; exit 1; fi

step 'install again, with compilers'
install /tmp/packages/*.deb gcc g++ libc6-dev make pkg-config cmake

step 'build and run'
cd /tmp/sources
for way in '' --static; do
    # shellcheck disable=SC2046
    quietly cc ${way#-} -o tenants examples/tenants.c -pthread $(pkg-config $way --cflags --libs neap)
    says . ./tenants
done
quietly cmake -S tests/c_api/cmake -B built -DNEAP_WANTED="$(pkg-config --modversion neap)"
quietly cmake --build built
says . built/example_tenants
quietly built/shared libneap.so
quietly built/static static
step end
touch /tmp/passed
