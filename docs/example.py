# The source of example.ipynb: `python -m scripts.notebook` executes it and writes that file. Cells begin with "# %%".
# client.md says how to run it as a program.

# %% [markdown]
# # Training in the database, from a notebook
#
# pg_tensile trains models inside PostgreSQL: the rows never leave the server, and the job goes on when this notebook
# is closed. The client asks, waits and shows. It finds the server as psql does: by PGHOST, PGPORT, PGUSER and
# PGDATABASE, or by `connect("postgresql://…")`, and wants pandas for its tables.

# %%
import json

import matplotlib.pyplot as plt
import pandas as pd
from sklearn.datasets import load_digits

from pg_tensile.client import connect

client = connect()

# %% [markdown]
# ## The data
#
# 1,797 images of handwritten digits, 8 × 8 pixels each, become a table (one of that name is replaced).
# `client.connection` is a psycopg connection, whose statements commit at once.

# %%
digits = load_digits()
client.connection.execute("DROP TABLE IF EXISTS handwriting")
client.connection.execute("CREATE TABLE handwriting (id int PRIMARY KEY, label int2, image int2[])")
with client.connection.cursor().copy("COPY handwriting FROM STDIN") as copy:
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        copy.write_row((number, int(label), image.astype(int).tolist()))

counts = client.connection.execute("SELECT label, count(*) AS images FROM handwriting GROUP BY 1 ORDER BY 1").fetchall()
pd.DataFrame(counts).set_index("label").transpose()

# %% [markdown]
# ## The model, and what training it would take
#
# A model is a name and an architecture. `explain` reads the rows, captures the training step and plans its memory, but
# trains nothing. Its numbers also come as JSON: here they give a budget between what the job takes without a plan and
# the least that it can do with.

# %%
client.register("handwriting", {"type": "cnn", "shape": [8, 8]}, replace=True)

training = {
    "model": "handwriting",
    "query": "SELECT label, image FROM handwriting WHERE id < 1500",
    "target": "label",
    "epochs": 15,
    "batch_size": 128,
    "learning_rate": 0.003,
    "options": {"task": "classification"},
}
as_json = {"task": "classification", "format": "json"}
memory = json.loads(client.explain(**training | {"options": as_json}))["memory"]
training["memory_budget"] = (memory["least_bytes"] + memory["vanilla_bytes"]) // 2

print(client.explain(**training))

# %% [markdown]
# ## Training
#
# `train` submits the job and returns at once. `wait` shows how far it is; interrupting it leaves the job running.

# %%
job = client.train(**training)
job.wait()

# %%
client.job(job.number)

# %%
metrics = job.metrics()
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
metrics["loss"].unstack().plot(ax=left, title="loss")
right_axes = metrics["accuracy"].unstack().plot(ax=right, title="accuracy")

# %% [markdown]
# ## What it did with its memory
#
# To keep to the budget, some tensors went to host memory after one operator and came back before another, or were
# computed again. These are the events of an iteration:

# %%
job.plan().head(10)[["event", "tensor_name", "bytes", "trigger_operator", "trigger_name", "deadline_operator"]]

# %%
megabytes = job.footprint()[["planned_bytes", "vanilla_bytes"]] / 2**20
axes = megabytes.plot(drawstyle="steps-post", figsize=(10, 3.5), xlabel="step of an iteration", ylabel="MB")
budget_line = axes.axhline(training["memory_budget"] / 2**20, color="gray", linestyle=":")

# %% [markdown]
# The slowest operators, in microseconds: predicted before the first iteration, measured last, and on average. Nobody
# has calibrated this server (`client.calibrate()`), so the predictions are rough. A job gets another plan when
# what is measured leaves what its plan was made with.

# %%
job.latency().nlargest(8, "average_us").round(2)

# %% [markdown]
# All of it is in the job's report, one HTML page that opens offline, with memory, the plan and every operator. A cell
# that ends with `job.report()` shows it; this one writes it to a file, because the page is larger than this notebook.

# %%
page = job.report("handwriting.html")
print("handwriting.html has the report")

# %% [markdown]
# ## Predictions
#
# The last 297 images were kept out of the training. Images that stand together are often by the same writer, so this is
# harder than the validation rows, which were taken from everywhere. `predict` returns a label and its probability for
# every row of a query, in the order of the query.

# %%
unseen = "SELECT {} FROM handwriting WHERE id >= 1500 ORDER BY id"
predicted = client.predict("handwriting", unseen.format("image"))
predicted.head()

# %%
labels = [row["label"] for row in client.connection.execute(unseen.format("label")).fetchall()]
truth = pd.Series(labels, index=predicted.index, name="digit")
read = predicted["label"].astype("int64").rename("read as")

print(f"{(read == truth).mean():.1%} of the images that it has never seen are read correctly")
pd.crosstab(truth, read)

# %% [markdown]
# The model stays in the server, where every session can use it in its queries:
# `SELECT predict_class('handwriting', h) FROM handwriting h`.

# %%
client.close()
