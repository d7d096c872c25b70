"""Shards of samples in remote stores: from URLs to samples.

sources    URLs, brace patterns, prefixes and MDS folders -> shards
measuring  sizes, sample counts, and the places where shards can be cut
catalogue  shards, and the pieces that they are cut into
stores     a URL -> the transport that reads it
reading    one piece of one shard -> samples
"""

from __future__ import annotations
