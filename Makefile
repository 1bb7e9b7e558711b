# pg_tensile: the C shim (built by PGXS), the Python packages, the demo and the tests.
#
# A newcomer needs two targets, `make demo` and `make test`: both set up what is missing first (scripts/setup.sh).
# A packager needs `make`, `make install DESTDIR=…` and `make installcheck`. `make help` lists the rest.

PG_CONFIG ?= pg_config
# The interpreter of the child processes, compiled in as the default of pg_tensile.python: PYTHON=…, else the venv's.
# (A variable of our own, because PGXS sets PYTHON to that of PL/Python.)
given_python := $(PYTHON)
child_python := $(or $(given_python),$(addsuffix /bin/python,$(realpath .venv)),python3)
VENV_PYTHON = .venv/bin/python

EXTENSION = pg_tensile
MODULE_big = pg_tensile
# Scripts of released versions are files, those of the version in development are built
EXTVERSION := $(shell sed -n "s/^default_version = '\(.*\)'/\1/p" pg_tensile.control)
RELEASED = 0.1.0
DATA = $(wildcard sql/pg_tensile--*.sql)
DATA_built = build/pg_tensile--$(EXTVERSION).sql build/pg_tensile--$(RELEASED)--$(EXTVERSION).sql
CSRC = pg_tensile/csrc
OBJS = $(patsubst %.c,%.o,$(wildcard $(CSRC)/*.c $(CSRC)/*/*.c))
PG_CFLAGS = -Wall -Wextra -Wshadow -Wno-unused-parameter -Wno-missing-field-initializers -Wno-sign-compare -Werror
# PostgreSQL 15 hides no symbol of an extension by itself, and loads them all into one name space.
SHLIB_LINK = -Wl,--version-script=$(CSRC)/exports.map
PG_CPPFLAGS = -I$(CSRC) -DPG_TENSILE_PYTHON='"$(child_python)"'
EXTRA_CLEAN = build tmp_check $(EVALUATOR)
# The shim is thin: inlining it into queries gains nothing.
override with_llvm = no
# A command that fails leaves no half-written target.
.DELETE_ON_ERROR:
# pg_regress gets a server of its own, see installcheck below.
NO_INSTALLCHECK = 1

.PHONY: help setup venv deploy demo demo-stop demo-remove test test-cuda first-gpu-run gpu-bundle dist packages test-install test-docker test-major test-majors test-headers test-long test-long-parts \
	test-sanitized release-check mutants emulator lint bench \
	install-evaluator uninstall-evaluator install-python uninstall-python installcheck always

PGXS := $(shell $(PG_CONFIG) --pgxs 2>/dev/null)
# Debian has pgxs.mk in the server's package already, the headers in another one.
ifneq ($(and $(wildcard $(PGXS)),$(wildcard $(shell $(PG_CONFIG) --includedir-server 2>/dev/null)/postgres.h)),)
all:
include $(PGXS)

$(OBJS): $(wildcard $(CSRC)/*/*.h)
pg_tensile.so: $(CSRC)/exports.map
# Everything is compiled again for another PostgreSQL, and guc.c, which holds the default of pg_tensile.python, for another
# interpreter. The files are written when what they say changes; PGXS has make ignore that a file is missing (.SECONDARY).
$(OBJS): build/server
$(CSRC)/base/guc.o: build/interpreter
build/server: says = $(VERSION)
build/interpreter: says = $(child_python)
build/server build/interpreter: always
	@mkdir -p build && echo '$(says)' | cmp -s - $@ || echo '$(says)' >$@

$(CSRC)/base/rules.o: build/rules.h

# Loops over numbers become vectors, also those with comparisons and roots, of which none traps or sets errno. Numbers are
# scaled as numpy does it, without one rounding for a product and a sum.
$(CSRC)/evaluator/dense.o: CFLAGS += -O3
$(CSRC)/evaluator/scaling.o: CFLAGS += -O3 -ffp-contract=off -fno-trapping-math -fno-math-errno

# The evaluator as a library that trainers load (pg_tensile/execution/evaluator.py), so without a sanitizer, which would
# have to be in their interpreter. Its map of exports chooses among symbols, all of which PGXS of 16 and later hides.
EVALUATOR = pg_tensile_evaluator$(DLSUFFIX)
EVALUATOR_OBJS = $(patsubst $(CSRC)/%.c,build/%.o,$(wildcard $(CSRC)/evaluator/*.c $(CSRC)/evaluator/library/*.c))
EVALUATOR_MAP = $(CSRC)/evaluator/library/exports.map
# From PostgreSQL 18 on its JSON parser for shared libraries has the buffers of libpq.
EVALUATOR_LIBS = -lpgcommon_shlib -lpgport_shlib $(if $(filter-out 15 16 17,$(MAJORVERSION)),-l:libpq.so.5) -lm
build/evaluator/dense.o: CFLAGS += -O3
build/evaluator/scaling.o: CFLAGS += -O3 -ffp-contract=off -fno-trapping-math -fno-math-errno
$(EVALUATOR_OBJS): build/server $(wildcard $(CSRC)/evaluator/*.h) $(CSRC)/base/compat.h
build/evaluator/%.o: $(CSRC)/evaluator/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(CFLAGS_SL) -fvisibility=default -fno-sanitize=all -DFRONTEND $(CPPFLAGS) -c $< -o $@
$(EVALUATOR): $(EVALUATOR_OBJS) $(EVALUATOR_MAP)
	$(CC) -shared -Wl,-z,defs,--version-script=$(EVALUATOR_MAP) $(EVALUATOR_OBJS) -L$(libdir) -L$(pkglibdir) \
		$(EVALUATOR_LIBS) -o $@
all: $(EVALUATOR)
install: install-evaluator
install-evaluator: $(EVALUATOR)
	$(MKDIR_P) '$(DESTDIR)$(pkglibdir)'
	$(INSTALL_SHLIB) $(EVALUATOR) '$(DESTDIR)$(pkglibdir)/'
uninstall: uninstall-evaluator
uninstall-evaluator:
	rm -f '$(DESTDIR)$(pkglibdir)/$(EVALUATOR)'

# The packages of the supervisors and children, beside the library, which looks for them there (0.1.0 had them below
# datadir); replaced by two renames, so that a running server never sees half of them.
python_packages = pyworker pg_tensile
python_dir = $(DESTDIR)$(pkglibdir)/pg_tensile/python
install: install-python
install-python:
	rm -rf '$(python_dir).new' '$(python_dir).old'
	mkdir -p '$(python_dir).new'
	find $(wildcard $(python_packages)) -name '*.py' -o -name '*.css' -o -name '*.js' -o -name '*.json' -o -name '*.j2' | tar cf - -T - | tar xf - --no-same-owner -C '$(python_dir).new'
	-/usr/bin/python3 -m compileall -q -s '$(python_dir).new' -p '$(pkglibdir)/pg_tensile/python' '$(python_dir).new'
	chmod go=rx '$(dir $(python_dir))'
	chmod -R go=rX '$(python_dir).new'
	if [ -d '$(python_dir)' ]; then mv '$(python_dir)' '$(python_dir).old'; fi
	mv '$(python_dir).new' '$(python_dir)'
	rm -rf '$(python_dir).old'
uninstall: uninstall-python
uninstall-python:
	rm -rf '$(DESTDIR)$(pkglibdir)/pg_tensile' '$(DESTDIR)$(datadir)/pg_tensile'

# Works without a running server and without the venv: a packager's check of the SQL surface.
installcheck:
	PG_CONFIG='$(PG_CONFIG)' scripts/installcheck.sh
else
all install installcheck:
	@echo "make: PostgreSQL's server headers are missing ($(PG_CONFIG) finds none): run 'make venv' or install postgresql-server-dev" >&2; exit 1
clean:
	rm -rf build tmp_check $(CSRC)/*.o $(CSRC)/*/*.o *.so
endif

# A folder for each subject. Tables come first, then functions, those for users, and views; bodies are not checked before
# they run, so order matters to types, triggers, policies and views only.
sql_subjects = models jobs training tuning schedules predictions evaluation drift memory files
sql_named = $(wildcard $(sql_subjects:%=sql/%/$(1).sql))
sql_functions = $(filter-out %/tables.sql %/api.sql %/views.sql,$(foreach subject,$(sql_subjects),$(sort $(wildcard sql/$(subject)/*.sql))))
sql_files = sql/schemas.sql sql/base.sql sql/owners.sql $(call sql_named,tables) sql/restore.sql $(sql_functions) \
	$(call sql_named,api) $(call sql_named,views) sql/privileges.sql
build/pg_tensile--$(EXTVERSION).sql: $(sql_files) $(sql_subjects:%=sql/%)
	@mkdir -p build
	awk 'FNR == 1 && NR > 1 { print "" } { print }' $(sql_files) >$@

build/pg_tensile--$(RELEASED)--$(EXTVERSION).sql: scripts/upgrade_script.py sql/pg_tensile--$(RELEASED).sql \
		build/pg_tensile--$(EXTVERSION).sql sql/upgrade.sql
	python3 $^ >$@

# A string literal for rules.c
build/rules.h: pg_tensile/rules.json
	@mkdir -p build
	sed 's/\\/\\\\/g; s/"/\\"/g; s/.*/"&\\n"/' $< >$@

help:
	@echo 'make demo            set up, start a private server, learn the prices of diamonds, train two models at once'
	@echo 'make demo-stop       stop the demo server;  make demo-remove: remove its data as well'
	@echo 'make, make install   compile and install the extension (PG_CONFIG=…, PYTHON=… for the children, DESTDIR=…)'
	@echo 'make deploy          the same with what is missing for it;  make venv: and what tests, lint and benchmarks need'
	@echo 'make installcheck    pg_regress against a temporary server with the installed extension'
	@echo 'make test            set up and run the tests, but for the long ones'
	@echo 'make test-long       the long ones, goes on where it was stopped (PARTS=0,1), then test-major and test-sanitized'
	@echo 'make test-major      tests of the server with another PostgreSQL (MAJOR=17, 18 or 19; TESTS=…)'
	@echo 'make test-majors     all tests of the server with PostgreSQL 19 and 18 (MAJORS="17 18")'
	@echo 'make release-check   all that a release is checked with, in parts that are kept (PARTS=lint,dist; ARGS=--list)'
	@echo 'make test-headers    compile against the headers of PostgreSQL 16'
	@echo 'make test-sanitized  the server'"'"'s tests with a PostgreSQL that finds errors of memory'
	@echo 'make test-cuda       the tests that need a GPU (PYTHON=… if not in .venv)'
	@echo 'make test-docker     build the container image and test it (BASE=…, PG_MAJOR=…, TORCH=…, TORCH_INDEX=…)'
	@echo 'make mutants         does make test see 34 faults? (MUTANTS="--only …")'
	@echo 'make lint            ruff, mypy, pgspot, C with -Werror'
	@echo 'make first-gpu-run   one of six parts of tests and benchmarks on a GPU, nine minutes at most (PART=1 to 6, ARGS=…)'
	@echo 'make gpu-bundle      a folder with all that a machine without a network needs (BUNDLE="--python 3.12 --at-hand FILE")'
	@echo 'make dist            the archive for PGXN, dist/pg_tensile-$(EXTVERSION).zip, out of the last commit'
	@echo 'make packages        Debian packages, built and tested in clean folders (MAJORS="15 17"; 18 and 19 by choice)'
	@echo 'make test-install    the commands of docs/install.md in clean folders, with these packages and from source (MAJORS)'
	@echo 'make bench           benchmarks: BENCH="plans|server|answers --section NAME … --quick"; BENCH="plans --list" names them'
	@echo 'make wheel           the Python client as files for pip: dist/pg_tensile-$(EXTVERSION)-py3-none-any.whl and .tar.gz'
	@echo 'make clean           remove what was compiled'
	@echo 'CONTRIBUTING.md says more about tests, docs/benchmarks.md about benchmarks.'

# What compiling, installing and the demo need
setup:
	@scripts/setup.sh

# and what tests, lint and benchmarks need besides
venv:
	@scripts/setup.sh test

# A second make, because this one may have started before pg_config existed, with as many compilers as there are
# processors (unless this make was given a number).
jobs = $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(shell nproc))
deploy: setup
	@$(MAKE) --no-print-directory -s $(jobs) all
	@scripts/as_installer.sh $(MAKE) --no-print-directory -s install

# The Python distribution; needs a network, but no .venv
.PHONY: wheel
wheel:
	@scripts/wheel.sh dist

demo: deploy
	@$(VENV_PYTHON) -m scripts.demo
demo-stop:
	@$(VENV_PYTHON) -m scripts.demo stop
demo-remove:
	@$(VENV_PYTHON) -m scripts.demo remove

PYTEST = $(VENV_PYTHON) -m pytest -p tests.parts -n 2 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5
test: venv deploy
	@$(MAKE) --no-print-directory -O $(jobs) lint emulator
	@$(PYTEST) $(if $(LONG_PART),--long-part $(LONG_PART),-m 'not long') $(if $(SUMMARY),--summary $(SUMMARY)) tests

# What takes long: the tests that say so and more examples of property tests, in four parts, and the tests of the server
# with another PostgreSQL.
test-long: test-long-parts
	@$(MAKE) --no-print-directory test-major test-sanitized
test-long-parts: venv deploy emulator
	@$(VENV_PYTHON) -m scripts.long_tests --pytest "$(PYTEST)" $(if $(PARTS),--parts $(PARTS))

# All that a release is checked with, a file for each part; goes on where it was stopped (PARTS=lint,dist; ARGS=--list)
release-check: venv
	@$(VENV_PYTHON) -m scripts.release_check $(if $(PARTS),--parts $(PARTS)) $(ARGS)

# The server's tests with a PostgreSQL that finds errors of memory, but for those in which no more of its C runs
OUTSIDE = client demo docs notebook report top accelerator predict_device ranks rank_kills dump_restore small_tables
test-sanitized: venv
	@scripts/sanitized.sh $(PYTEST) -m 'not long' \
		$(filter-out $(patsubst %,tests/server/test_%.py,$(OUTSIDE)),$(wildcard tests/server/test_*.py))

# Installs mutants of the extension, and at its end the checkout's again.
mutants: venv deploy
	@$(VENV_PYTHON) -m tests.mutants $(MUTANTS)

# Compile the emulated accelerator, which takes longer than a test may.
emulator: venv
	@$(VENV_PYTHON) tests/emulated/emulated/build.py

# Needs a GPU and nothing else: on a machine without .venv, PYTHON=python3 names an interpreter that has torch and pytest.
test-cuda:
	@$(child_python) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make test-cuda: PyTorch sees no CUDA device: check nvidia-smi, and that torch is built for CUDA")'
	@PG_TENSILE_ACCELERATOR=cuda $(child_python) -m pytest --confcutdir tests/accelerator tests/accelerator

# One of six parts, with a page of results (scripts/first_gpu_run); without PART, the next that has not run
first-gpu-run:
	@$(child_python) -m scripts.first_gpu_run $(PART) $(ARGS)

# What a machine without a network needs, at most 45 MiB, in the folder gpu-bundle; see scripts/gpu_bundle
gpu-bundle: setup
	@$(VENV_PYTHON) -m scripts.gpu_bundle $(BUNDLE)

# The archive for PGXN; the same commit gives the same bytes
dist:
	@scripts/dist.sh

# Debian's packages in build/packages, for the Debians that have these versions
packages test-install: MAJORS = 15 17
packages:
	@scripts/packages.sh $(MAJORS)

# The commands of docs/install.md in clean folders of these Debians, with the packages that are in build/packages
test-install:
	@set -e; for major in $(MAJORS); do for way in packages source; do scripts/install_guide.sh $$way $$major; done; done

# Docker or Podman; on Debian as root or with sudo also without either (scripts/test_docker.sh says how).
test-docker: venv
	@scripts/test_docker.sh

# The tests of what is compiled differently for each version (csrc/base/compat.h)
MAJOR = 17
OF_VERSIONS = batching catalogue evaluate explain_sessions feed launcher lineage predict security session_models \
	statement_versions submit wait_for_job workers
TESTS = $(patsubst %,tests/server/test_%.py,$(OF_VERSIONS))
test-major: venv
	@scripts/debian_folder.sh $(MAJOR) bash -c "make -s installcheck && exec $(PYTEST) -m 'not long' $(TESTS)"

# The newest versions, with all tests of the server but for those of the report, which need Chromium, and of the emulated
# accelerator, which would have to be compiled in each folder.
test-majors: TESTS = $(filter-out $(addprefix tests/server/test_,report.py accelerator.py predict_device.py),$(wildcard tests/server/test_*.py))
test-majors: MAJORS = 19 18
test-majors: venv
	@set -e; for major in $(MAJORS); do $(MAKE) --no-print-directory test-major MAJOR=$$major TESTS='$(TESTS)'; done

test-headers: venv build/rules.h
	@scripts/check_headers.sh $(PG_CFLAGS) $(PG_CPPFLAGS)

lint: venv
	@scripts/lint.sh

# Sections of plans need no server. Without .venv, PYTHON=python3 names an interpreter, as for test-cuda.
BENCH = --help
bench: $(if $(given_python),,venv) $(if $(filter server answers,$(BENCH)),deploy)
	@$(or $(given_python),$(VENV_PYTHON)) -m benchmarks $(BENCH)
