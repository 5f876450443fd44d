"""Trains a convnet on a folder of images, ROOT/CLASS/*.png, and tests it on a fifth of them.

python image_folder.py                                         # first draws digits into a temporary folder
python image_folder.py ROOT
torchrun --standalone --nproc_per_node=2 image_folder.py ROOT
"""

import argparse
import random
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import dtrain

SIZE, BATCH, LR = 32, 32, 2e-3  # pixels of a side; images of a rank in a step; peak learning rate


def draw_digits(root, count=1300):
    """Writes images of digits in the fonts of matplotlib, at random places, sizes, angles and colors."""
    draws = random.Random(0)
    fonts = sorted(Path(matplotlib.get_data_path(), "fonts/ttf").glob("DejaVuSans*.ttf"))
    fonts = [font for font in fonts if "Display" not in font.name]  # which has no digits
    for number in range(count):
        digit, font = str(number % 10), ImageFont.truetype(str(draws.choice(fonts)), draws.randint(16, 26))
        image = Image.new("RGB", (SIZE, SIZE))
        place = [SIZE / 2 + draws.randint(-4, 4) for _ in range(2)]
        color = tuple(draws.randint(100, 255) for _ in range(3))
        ImageDraw.Draw(image).text(place, digit, fill=color, font=font, anchor="mm")
        (root / digit).mkdir(exist_ok=True)
        image.rotate(draws.uniform(-20, 20)).save(root / digit / f"{number:05d}.png")


class Images(Dataset):
    """Files as (pixels, label, weight); the key of an item is its index and its weight."""

    def __init__(self, files, classes):
        self.files, self.classes = files, classes

    def __getitem__(self, key):
        index, weight = key
        with Image.open(self.files[index]) as image:
            pixels = np.array(image.convert("RGB").resize((SIZE, SIZE)), dtype=np.float32) / 255
        return torch.from_numpy(pixels).permute(2, 0, 1), self.classes.index(self.files[index].parent.name), weight


class RankBatches:
    """Deals the batches of an epoch to the ranks, the same number to each.

    DistributedSampler fills up the ranks with images that then count twice. Here a rank that is short of a batch takes
    part in the step with an image of weight 0, so each image counts exactly once, in training and in accuracy.
    """

    def __init__(self, count, engine, shuffle):
        self.count, self.engine, self.shuffle, self.epoch = count, engine, shuffle, 0

    def __iter__(self):
        draws = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.count, generator=draws) if self.shuffle else torch.arange(self.count)
        self.epoch += 1
        batches = [[(index, 1) for index in batch] for batch in order.split(BATCH)]
        batches += [[(0, 0)]] * (-len(batches) % self.engine.world_size)
        yield from batches[self.engine.rank :: self.engine.world_size]

    def __len__(self):
        return -(-self.count // (BATCH * self.engine.world_size))


def convnet(num_classes):
    layers, channels = [], 3
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (SIZE // 8) ** 2, num_classes))


def evaluate(engine, loader, num_classes):
    """Returns how often each class was taken for each other [true, guessed]."""
    # BatchNorm's running statistics are those of a rank's own batches; a checkpoint holds rank 0's, so test with them.
    # Rank 0 is never short of a batch, so they have seen no image of weight 0.
    engine.copy_buffers()
    confusion = torch.zeros(num_classes, num_classes, device=engine.device)
    with engine.eval():
        for x, y, weight in loader:
            guess = engine(x.to(engine.device, memory_format=torch.channels_last)).argmax(dim=1)
            confusion.index_put_((y.to(engine.device), guess), weight.float().to(engine.device), accumulate=True)
    if engine.world_size > 1:
        dist.all_reduce(confusion)
    return confusion


def train(files, epochs):
    classes = sorted({file.parent.name for file in files})
    torch.manual_seed(0)
    engine = dtrain.initialize(
        convnet(len(classes)),  # channels_last is the layout of its inputs; weights are views of flat buffers
        optimizer=dtrain.AdamW(lr=LR, weight_decay=0.05),
        precision="bf16",  # weights and statistics of BatchNorm stay FP32
    )
    log = print if engine.rank == 0 else lambda _: None

    def loader(files, shuffle):
        batches = RankBatches(len(files), engine, shuffle)
        return DataLoader(Images(files, classes), batch_sampler=batches, num_workers=2, persistent_workers=True)

    training = loader([file for number, file in enumerate(files) if number % 5], shuffle=True)
    held_out = loader(files[::5], shuffle=False)
    total_steps = epochs * len(training)
    for epoch in range(1, epochs + 1):
        loss = seen = 0.0
        for x, y, weight in training:
            logits = engine(x.to(engine.device, memory_format=torch.channels_last))
            engine.backward(cross_entropy(logits, y.to(engine.device)), weight=int(weight.sum()))
            outcome = engine.step(lr=LR * (1 - engine.attempted_steps / total_steps))
            loss, seen = loss + outcome.loss * outcome.weight, seen + outcome.weight  # of all ranks
        confusion = evaluate(engine, held_out, len(classes))
        total = int(confusion.sum())
        accuracy = int(confusion.diag().sum()) / total
        log(f"epoch {epoch}: loss {loss / seen:.3f} over {seen:.0f} images, accuracy {accuracy:.3f} over {total}")
    true, guess = divmod(int(confusion.fill_diagonal_(0).argmax()), len(classes))
    if times := int(confusion[true, guess]):
        log(f"worst pair: {classes[true]} taken for {classes[guess]}, {times} times")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", help="holds a folder of PNG files for each class")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # of each rank; all draw the same images
        if not args.root:
            draw_digits(Path(folder))
        files = sorted(Path(args.root or folder).glob("*/*.png"))
        if len(files) < 10:
            parser.error(f"{args.root} holds {len(files)} files named CLASS/*.png; expected 10 or more")
        train(files, args.epochs)


if __name__ == "__main__":
    main()
