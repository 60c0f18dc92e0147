"""What BigFace published of size and score, read off its plots to 0.0001.

ResNets with CosFace on the 2,059,906 identities of WebFace42M, synthetic masks on a
share of the images. True accept rates on IJB-C at a false accept rate of 1e-4, with and
without synthetic masks, and the score of the Masked Face Recognition challenge (ICCV
2021), a false reject rate. One run each. The network of 159 M parameters is in the plot
and not in the table. The identities' class weights count as parameters "with_head".
"""

HEAD = 2_059_906 * 512  # class weights
IMAGES, IDENTITIES = 42_500_000, 2_059_906  # the former about
BACKBONES = {
    "R140": 87_013_696,
    "R200": 118_833_920,
    "159M": 1_213_800_000 - HEAD,
    "R240": 137_229_376,
    "R600": 306_490_816,
    "R1.2K": 654_429_376,
}
MASKED_IJBC = {"R200": 0.9648, "159M": 0.9663, "R600": 0.9680, "R1.2K": 0.9686}
IJBC = {"R200": 0.9793, "159M": 0.9795, "R600": 0.9805, "R1.2K": 0.9807}
CHALLENGE = {  # score of the network alone, and distilled from a larger one
    "scratch": {"R140": 0.0947, "R200": 0.0846, "R240": 0.0803},
    "distilled": {"R140": 0.0939, "R200": 0.0805, "R240": 0.0769},
}


def bigface() -> list[dict]:
    """The points as rows of a table of runs."""
    rows = []
    for series, scores in CHALLENGE.items():
        for name, backbone in BACKBONES.items():
            row = {"name": name, "series": series, "backbone": backbone}
            row |= {"with_head": backbone + HEAD}
            row |= {"images": IMAGES, "identities": IDENTITIES}
            if series == "scratch":
                row |= {"masked_ijbc": MASKED_IJBC.get(name), "ijbc": IJBC.get(name)}
            row["challenge"] = scores.get(name)
            rows.append(row)
    return rows
