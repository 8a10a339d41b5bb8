"""The model families that the package is tested with: their tokenizers, and their architectures."""

from tests.families.tokenizers import FAMILIES as FAMILIES
