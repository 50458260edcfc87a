# # Tutorial: convert a ViT
#
# A vision transformer (ViT) cuts an image into patches, and passes them through blocks of attention and two linear
# layers. This one is small enough to train in seconds:

import torch
from torch import nn
from torch.nn import functional

from ksgen.figures.charts import chain_svg
from ksgen.torch import KSLinear, convert, propose

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, features=64, heads=4):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(features) for _ in range(2))
        self.qkv, self.projection = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.projection(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class ViT(nn.Module):
    def __init__(self, features=64, depth=2, classes=4):
        super().__init__()
        self.patches = nn.Conv2d(1, features, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(16, features))
        self.blocks = nn.Sequential(*(Block(features) for _ in range(depth)))
        self.head = nn.Linear(features, classes)

    def forward(self, images):
        return self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2) + self.places).mean(1))


#
# The images are noisy stripes of 16 x 16 pixels. The label is their direction:


def stripes(count):
    labels, phase = torch.randint(4, (count,)), 6.3 * torch.rand(count, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    along = torch.stack([rows, columns, rows + columns, rows - columns])[labels]
    return (torch.sin(along + phase) + 0.5 * torch.randn(count, 16, 16))[:, None], labels


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(steps):
        images, labels = stripes(64)
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def accuracy(model):
    images, labels = stripes(1000)
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


model = ViT()
train(model, 150)
dense_accuracy = accuracy(model)
print("accuracy of the dense model:", f"{dense_accuracy:.0%}")

# Which chains may replace a layer? `propose` lists them with their parameters and expected times. With a
# budget of 0.4, a chain has at most 40 % of the dense layer's parameters:

proposed = propose(64, 256, budget=0.4)
print(proposed)

# A rule names the layers, and the chain of each. The factors are computed from the dense weights, so that their
# product is as near to them as possible. The patch embedding and the head stay dense.

rule = {"up": [(4, 16, 16, 1), (1, 64, 16, 4)], "down": [(4, 16, 64, 1), (1, 16, 16, 4)]}
before = sum(each.numel() for each in model.parameters())
converted = convert(model, {f"blocks.{number}.{name}": chain for number in range(2) for name, chain in rule.items()})
print(converted)

# The chain of `up` has four blocks, then blocks that mix across them:

print(chain_svg(model.blocks[0].up.chain))

# The product of the factors only approximates the old weights, so the model is trained further. Kernels compute the
# gradients of `KSLinear` too.

print("accuracy after the conversion:", f"{accuracy(model):.0%}")
train(model, 150)
trained_accuracy = accuracy(model)
print("after more training:", f"{trained_accuracy:.0%}")
print("parameters:", f"{sum(each.numel() for each in model.parameters())} instead of {before}")
print("nearly as good as dense:", trained_accuracy > dense_accuracy - 0.1)

# For inference, `freeze` packs the weights once:

model.eval()
images, _ = stripes(8)
expected = model(images)
for layer in model.modules():
    if isinstance(layer, KSLinear):
        layer.freeze()
with torch.no_grad():
    print("frozen layers give the same:", torch.allclose(model(images), expected, atol=1e-4))

# A real model is converted by the same function: `convert(model, budget=0.3)` proposes a chain for each layer.
# [Factorisation](../factorize.md) says how near such products are, and `examples/fine_tune.py` converts a model of
# transformers. `ksgen bench model vit-s16` times ViT-S/16, dense and sparse.
#
