"""The networks that benchmarks train by `pg-tensile bench`, and their arguments of the command."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Network(NamedTuple):
    """A model at full size.

    `batch`: a batch size with which a step takes a little over 200 ms on two cores; `step_s`: approximate seconds of a
    step with batch 16 on one of them.
    """

    title: str
    model: str
    inputs: tuple[str, ...]
    loss: tuple[str, ...] = ("--classes", "1000")
    batch: int = 1
    kwargs: str = "{}"
    step_s: float = 0.0

    def arguments(self, batch: int | None = None) -> tuple[str, ...]:
        inputs = tuple(part for spec in self.inputs for part in ("--input", spec))
        kwargs = ("--kwargs", self.kwargs) if self.kwargs != "{}" else ()
        return ("--model", self.model, *kwargs, *inputs, *self.loss, "--batch", str(batch or self.batch))


def named(networks: Iterable[Network], title: str) -> Network:
    return next(network for network in networks if network.title == title)


IMAGE, LARGE_IMAGE, SMALL_IMAGE = ("float32:3x224x224",), ("float32:3x299x299",), ("float32:3x32x32",)
CV, OWN = "pytorchcv.models", "benchmarks.experiments.models"
TEN = ("--classes", "10")

VGG16 = Network("VGG-16", f"{CV}.vgg:vgg16", IMAGE, step_s=14.0)
INCEPTION3 = Network("Inception v3", f"{CV}.inceptionv3:inceptionv3", LARGE_IMAGE, step_s=6.5)
INCEPTION4 = Network("Inception v4", f"{CV}.inceptionv4:inceptionv4", LARGE_IMAGE, step_s=13.0)
RESNET50 = Network("ResNet-50", f"{CV}.resnet:resnet50", IMAGE, batch=2, step_s=4.8)
DENSENET121 = Network("DenseNet-121", f"{CV}.densenet:densenet121", IMAGE, batch=2, step_s=5.0)
PAPER = (RESNET50, DENSENET121, INCEPTION3, VGG16, INCEPTION4)  # of TENSILE, section V-A

ALEXNET = Network("AlexNet", f"{CV}.alexnet:alexnet", IMAGE, batch=4)
GOOGLENET = Network("GoogLeNet", f"{OWN}:googlenet", IMAGE, batch=4)
SQUEEZENET = Network("SqueezeNet", f"{CV}.squeezenet:squeezenet_v1_0", IMAGE, batch=4)
MOBILENET = Network("MobileNet", f"{CV}.mobilenet:mobilenet_w1", IMAGE, batch=4)
NASNET = Network("NASNet", f"{CV}.nasnet:nasnet_4a1056", IMAGE, batch=2)
BERT = Network("BERT, 6 layers", f"{OWN}:bert", ("int64<30522:128",), ("--classes", "2"), 2, '{"layers": 6}')
GPT2 = Network("GPT-2, 6 layers", f"{OWN}:gpt2", ("int64<50257:64",), ("--loss", "lm"), 1, '{"layers": 6}')
LSTM = Network("LSTM", f"{OWN}:LSTMClassifier", ("int64<1000:32",), TEN, batch=16)
GCN = Network("GCN", f"{OWN}:GCN", ("float32:128", "float32:256"), ("--classes", "7"), batch=256)
TABULAR = Network("tabular", f"{OWN}:TabularLoss", ("float32:20", "int64<2"), ("--loss", "model"), batch=256)

# fine-tuned, with their adapters or all weights trained
TUNED = {"lora": "LoRA", "full": "all weights"}
MINILM = tuple(
    Network(
        f"MiniLM, {what}", f"{OWN}:minilm", ("int64<30523:64",), ("--classes", "2"), 16, f'{{"tune": "{tune}"}}', 1.0
    )
    for tune, what in TUNED.items()
)
DECODER = tuple(
    Network(
        f"GPT-2, {what}", f"{OWN}:decoder", ("int64<50258:64",), ("--classes", "2"), 8, f'{{"tune": "{tune}"}}', 5.0
    )
    for tune, what in TUNED.items()
)
SMALL_DECODER = Network(
    "small GPT-2, LoRA",
    f"{OWN}:decoder",
    ("int64<1001:16",),
    ("--classes", "2"),
    8,
    '{"tune": "lora", "layers": 2, "width": 128, "vocabulary": 1000}',
)

# of other shapes than those of the papers, which the planner was made with
UNTUNED_MODELS = "benchmarks.experiments.untuned"
VIT = Network("ViT, 8 layers", f"{UNTUNED_MODELS}:VisionTransformer", IMAGE, batch=8)
MIXER = Network("MLP-Mixer", f"{UNTUNED_MODELS}:Mixer", IMAGE, batch=16)
UNET = Network("U-Net", f"{UNTUNED_MODELS}:UNet", ("float32:3x128x128",), TEN, 8)
UNROLLED_GRU = Network("unrolled GRU", f"{UNTUNED_MODELS}:UnrolledGRU", ("int64<2000:64",), ("--loss", "lm"), 32)
UNTUNED = (
    GPT2._replace(batch=4, inputs=("int64<50257:128",)),
    VIT,
    Network("dilated convolutions", f"{UNTUNED_MODELS}:DilatedConvolutions", ("float32:1x2048",), TEN, 8),
    UNROLLED_GRU,
    MIXER,
    UNET,
    RESNET50,
    DENSENET121._replace(batch=8),
)

# with which the constants of the planner are found (benchmarks/plans/prices.py)
TUNING = (
    VGG16._replace(batch=4),
    INCEPTION3._replace(batch=4),
    ALEXNET,  # memory is mostly parameters and optimizer state, as BERT's
    GOOGLENET,
    MOBILENET,
    SQUEEZENET,
    BERT,
    LSTM,
)

# small variants, for trials
SMALL_BERT = BERT._replace(kwargs='{"layers": 2, "width": 128, "vocabulary": 1000}', inputs=("int64<1000:32",))
SMALL_GPT2 = GPT2._replace(kwargs='{"layers": 2, "width": 128, "vocabulary": 1000}', inputs=("int64<1000:32",))
SMALL_RESNET = Network("ResNet-20", f"{CV}.resnet_cifar:resnet20_cifar10", SMALL_IMAGE, TEN, 4, step_s=0.1)
SMALL_SERESNET = Network("SE-ResNet-20", f"{CV}.seresnet_cifar:seresnet20_cifar10", SMALL_IMAGE, TEN, 4, step_s=0.15)
SMALL_DENSENET = Network("DenseNet-40", f"{CV}.densenet_cifar:densenet40_k12_cifar10", SMALL_IMAGE, TEN, 4, step_s=0.3)

# small enough for their best plan to be found
SMALL, SEQUENCE = "benchmarks.experiments.tiny", ("float32:64x64",)
TINY = (
    Network("MLP", f"{SMALL}:mlp", ("float32:256",), TEN, 1024),
    Network("wide MLP", f"{SMALL}:mlp", ("float32:256",), TEN, 64, '{"hidden": 2048}'),
    Network("deep MLP", f"{SMALL}:mlp", ("float32:256",), TEN, 4096, '{"layers": 6}'),
    Network("CNN", f"{SMALL}:cnn", SMALL_IMAGE, TEN, 64),
    Network("CNN, batch norm", f"{SMALL}:cnn", SMALL_IMAGE, TEN, 64, '{"norm": true}'),
    Network("deep CNN", f"{SMALL}:cnn", SMALL_IMAGE, TEN, 64, '{"layers": 7}'),
    Network("residual", f"{SMALL}:Residual", SMALL_IMAGE, TEN, 64),
    Network("attention", f"{SMALL}:Attention", SEQUENCE, TEN, 64),
)
