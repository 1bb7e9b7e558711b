#!/bin/bash
# In a folder of scripts/packages.sh: builds the packages of one major version from /build/pg-tensile into /out.
set -Eeuo pipefail
major=$1
export PG_SUPPORTED_VERSIONS=$major LC_ALL=C.UTF-8 DEB_BUILD_OPTIONS=nocheck
cd /build/pg-tensile
pg_buildext updatecontrol
dpkg-buildpackage -b -us -uc
cd ..
lintian --allow-root --fail-on error,warning --info --tag-display-limit 0 ./*.changes | tee /out/lintian.txt
[ -s /out/lintian.txt ] || echo 'lintian: nothing to complain of' >/out/lintian.txt
cp ./*.deb ./*.buildinfo ./*.changes /out

# A source installation of 0.1.0, as an archive
if [ -d released ]; then
    options=(-s PG_CONFIG="/usr/lib/postgresql/$major/bin/pg_config" PYTHON=/var/lib/pg-tensile/venv/bin/python)
    make -C released "${options[@]}" all
    make -C released "${options[@]}" install DESTDIR=/build/root
    tar -c -C root . >/out/released.tar
fi
