#!/bin/bash
# Compiles each program of a list, and runs it under the preload library, inside the root of an
# older system. `cargo xtask old-glibc` makes that root and runs this script there.
#
# Lines on standard input: a file of this folder, and the program's arguments.
set -u
library=$1
cd "$(dirname "$0")" || exit 1
out=$(mktemp -d)
failed=0

# compile SOURCE OBJECT [FLAG...]
compile() {
    local cc=(gcc)
    case $1 in *.cpp) cc=(g++ -std=c++17) ;; esac
    "${cc[@]}" -O1 -D_GNU_SOURCE -fno-builtin -pthread "${@:3}" -o "$2" "$1" 2>"$out/messages" ||
        { cat "$out/messages"; return 1; }
}

build() {
    local stem=${1%.*} flags=(-Wl,--no-as-needed -ldl) companion source
    for companion in library linked; do
        for source in "${stem}_$companion".c "${stem}_$companion".cpp; do
            [ -e "$source" ] || continue
            compile "$source" "$out/${stem}_$companion.so" -fPIC -shared || return 1
            [ "$companion" = linked ] && flags+=("$out/${stem}_$companion.so")
        done
    done
    compile "$1" "$out/$stem" -Wl,--start-group "${flags[@]}" -Wl,--end-group
}

while read -r file arguments; do
    if ! build "$file"; then
        echo "  FAILED   $file: it does not compile"
        failed=1
        continue
    fi
    # shellcheck disable=SC2086
    said=$(cd "$out" && LD_PRELOAD=$library timeout 180 "./${file%.*}" $arguments 2>"$out/messages" </dev/null)
    status=$?
    if [ "$said" = ok ] && [ $status = 0 ]; then
        echo "  ok       $file"
    else
        echo "  FAILED   $file: status $status: $(tail -1 "$out/messages")"
        failed=1
    fi
done
exit $failed
