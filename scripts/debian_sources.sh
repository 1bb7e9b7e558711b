# shellcheck shell=bash
# Debian's package sources for mmdebstrap, read by the scripts that make a Debian with it.

# The sources.list of release $1 (a code name), at the mirrors that this machine's apt gets its own release from.
debian_sources() {
    local own
    own=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        awk -v own="$own" -v wanted="$1" '
            $3 != "main" { next }
            $2 == own { print "deb", $1, wanted, "main" }
            wanted == "sid" || wanted == "experimental" { next }
            $2 == own "-updates" || $2 == own "-security" { sub("^" own, wanted, $2); print "deb", $1, $2, "main" }' |
        sort -u | grep . ||
        {
            echo "apt has no sources of Debian $own" >&2
            echo "hint: Look into /etc/apt/sources.list.d." >&2
            return 1
        }
}

# Options that let apt reach these mirrors as this machine does: proxies, and mirrors that stand still.
debian_options() {
    apt-config dump | sed -nE "s/^(Acquire::(http|https|Check-Date|Check-Valid-Until)(::.*)? \"[^\"]+\");\$/--aptopt=\1/p"
}
