"""The network."""

from torch import nn


class BlockEg(nn.Module):
    def __init__(self, input_size: int = 180):
        super().__init__()
        self.layer1 = nn.Linear(input_size, 32)

    def forward(self, x):
        return self.layer1(x)


class DNN(nn.Module):
    """Every argument has a default, an object where it is one: so the whole tree of them is in conf.yaml."""

    def __init__(
        self,
        input_size: int = 180,
        output_size: int = 10,
        layer_widths: tuple[int, ...] = (5, 10, 5),
        block: BlockEg = BlockEg(),  # noqa: B008
        fc: nn.Linear = nn.Linear(32, 10),  # noqa: B008
    ):
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.layer_widths = layer_widths
        self.block = block
        self.fc = fc

    def forward(self, x):
        return self.fc(self.block(x))
