#!/bin/bash
# Tells whether a run of continuous integration has to build and test the image: exit status 0 if so, else 1.
#
#     scripts/image_due.sh [REVISION]
#
# It is due when what decides whether it can be built and started is not what it was at REVISION: the one tested last, or
# else the state sixteen commits ago, because a run may follow several commits. Otherwise it is due in one of four runs,
# chosen by the number of commits, so that a second run of a commit does the same. It is due, too, when git cannot tell.
#
# Not among the inputs: SQL, C and Python of the extension, which the other tests compile, install and run.
set -u
cd "$(dirname "$0")/.." || exit
inputs=(docker .dockerignore requirements.txt pg_tensile.control scripts/upgrade_script.py scripts/debian_sources.sh
    scripts/test_docker.sh scripts/debian_folder.sh scripts/cluster.py scripts/demo)

# The Makefile on standard input without the targets of a checkout (help and what follows), most of its changes.
build_rules() { sed -e ':line; /\\$/{N; b line}' -e '/^\.PHONY:/d; /^help:/,$d'; }

due() {
    echo "image-due: $1"
    exit 0
}

[ "$(git rev-parse --is-shallow-repository 2>&1)" = false ] || due "git does not know all commits"
tested=$(git rev-parse --verify --quiet "${1:-HEAD~16}^{commit}") || due "git does not know ${1:-HEAD~16}"
git diff --quiet "$tested" -- "${inputs[@]}" || due "its inputs have changed since ${tested:0:8}"
[ "$(build_rules <Makefile)" = "$(git show "$tested:Makefile" | build_rules)" ] ||
    due "the rules that build it have changed since ${tested:0:8}"
[ $(($(git rev-list --count HEAD) % 4)) != 0 ] || due "its turn has come"
echo "image-due: not in this run"
exit 1
