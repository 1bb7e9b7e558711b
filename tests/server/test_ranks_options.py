"""Jobs with ranks and the other arguments of train_model: plans, compression, a chosen batch size, pretrained models.

All long, because a job with ranks takes seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pretrained import save_bert
from tests.server.ranks_site import Site, making_site
from tests.server.support import Wait, digest, finish, value

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PATIENCE = "180 s"  # for a job, beside others
ROWS = 1024
WIDE = {"type": "mlp", "hidden": [256] * 6}
QUERY = f"""
    SELECT i % 4 AS label, (SELECT array_agg(sin(i * 0.37 + p * 0.011 * (1 + i % 4))::float4 ORDER BY p)
                            FROM generate_series(1, 64) p) AS image
    FROM generate_series(1, {ROWS}) i
"""
REVIEWS = """
    SELECT concat_ws(' ', 'it was a', (ARRAY['day', 'film'])[1 + i % 2],
                     CASE WHEN i % 3 = 0 THEN 'good' ELSE 'bad' END) AS body, i % 3 = 0 AS liked
    FROM generate_series(1, 240) i
"""


@pytest.fixture(scope="module")
def site(new_cluster: Callable[..., Any], wait_until: Wait, clusters_folder: Path) -> Iterator[Site]:
    models = clusters_folder / "models of ranks"
    save_bert(models / "bert")
    for path in (models, *models.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with making_site(new_cluster, wait_until, **{"pg_tensile.model_path": models}) as made:
        yield made


def test_plans_and_compression_change_no_bit(site: Site) -> None:
    arguments: dict[str, Any] = {"query": QUERY, "target": "label", "batch_size": ROWS, "epochs": 6, "validation": 0}
    task = {"task": "classification"}
    plain = site.submit(2, WIDE, policy="none", options=task, **arguments)
    finish(site.conn, plain, PATIENCE)
    for compression in ("none", "zvc"):
        options = task | {"compression": compression}
        job = site.submit(2, WIDE, policy="joint", memory_budget="6MB", options=options, **arguments)
        finish(site.conn, job, PATIENCE)
        assert value(site.conn, "SELECT count(*) FROM tensile.plans WHERE job = %s", job) == 1
        assert digest(site.conn, job) == digest(site.conn, plain), compression


def test_one_rank_trains_with_a_chosen_batch_size(site: Site) -> None:
    job = site.submit(1, batch_size=0, epochs=3)
    finish(site.conn, job, PATIENCE)
    assert value(site.conn, "SELECT batch_size FROM tensile.batch_sizes WHERE job = %s AND chosen", job) > 0


def test_ranks_train_a_pretrained_model(site: Site) -> None:
    architecture = {"type": "pretrained", "path": "bert", "tune": "full", "text": ["body"]}
    arguments: dict[str, Any] = {"query": REVIEWS, "target": "liked", "learning_rate": 1e-2, "validation": 0}
    job = site.submit(2, architecture, epochs=6, batch_size=16, **arguments)
    finish(site.conn, job, PATIENCE)
    model = value(site.conn, "SELECT model FROM tensile.jobs WHERE job = %s", job)
    right = f"SELECT count(*) FROM ({REVIEWS}) q WHERE predict_class('{model}', q) = q.liked::text"
    assert site.conn.execute(right).fetchall()[0][0] > 0.9 * 240
