"""Faults of partitions, readers and augmentations."""

from tests.mutants import Mutants

MUTANTS = [
    Mutants(
        "fedfr_jax/data/partition/identities.py",
        "data/test_partition_faces.py",
        [
            (
                "IdentitySplit(num_test, used - num_test, np",
                "IdentitySplit(0 * num_test, used - num_test, np",
            ),
            ("(counts > interval[0])", "(counts >= interval[0])"),
            ("_among(shuffled[half:]", "_among(shuffled[:half]"),
            ("np.split(public, [num_public_ids])", "public, public"),
            ("identities[np.argsort(first)]", "identities"),
            ("num_train, num_train, used - num_train", "used, num_train, used"),
            ("group(labels, keys, max_images)", "group(labels, keys)"),
            ("keys[ranked.order] += rank", "keys[ranked.order] += 0 * rank"),
            ('name_keys(names.images, seed, "kept")', "keys"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/partition/identity_assignment.py",
        "data/test_partition_faces.py",
        [
            ("free[assigned[i]] = False", "pass"),
            (
                "np.repeat(client_ids, split.num_test)",
                "np.sort(np.repeat(client_ids, split.num_test))",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/data/partition/client_partition.py",
        "data/test_partition_classes.py",
        [
            ("surplus[clients[:num_left_over]] += 1", "pass"),
            ("np.argsort(-rank", "np.argsort(rank"),
            (
                "np.arange(len(test_rows)) * len(owners) + phase",
                "np.arange(len(test_rows))",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/data/partition/label_skew.py",
        "data/test_partition_classes.py",
        [
            ("np.cumsum(shares), points", "np.cumsum(np.sort(shares)), points"),
            (
                "rng.dirichlet(np.full(num_clients, float(alpha)))",
                "np.full(num_clients, 1 / num_clients)",
            ),
            ("< capacity[receiver]", "< capacity.max()"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/selection.py",
        "data/test_join.py",
        [
            ("rows[is_here] - starts[i]", "rows[is_here] - starts[i] + (i > 0)"),
            ("s.labels + n for", "s.labels for"),
            ("else np.concatenate(arrays)", "else arrays[0]"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/recordio.py",
        "data/test_recordio.py",
        [
            ("if not has_id or", "if"),
            (
                "has_id = record.id == keys[row]",
                "has_id = True or record.id == keys[row]",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/classification_sets.py",
        "data/test_sources_arrays.py",
        [
            ("np.repeat([False, True], [len", "np.repeat([True, False], [len"),
            ("- np.searchsorted(grouped, grouped)", ""),
            ("drawers[order] = ", "drawers[:] = "),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/npz.py",
        "data/test_sources_arrays.py",
        [
            ("np.uint8(0), np.uint8(255))", "np.uint8(0), np.uint8(1))"),
            ('order = "F" if header', 'order = "C" if header'),
            ("        or is_fortran\n", ""),
            ("        or 0 in rest\n", ""),
            ("if values.size == 0:", "if False:"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/pairs.py",
        "data/test_pairs.py",
        [
            ("// num_each % 2 == 0", "// num_each % 2 == 1"),
            ("fields[0 if is_same else 2]", "fields[0]"),
            ("enumerate(lines, 2) if line.strip()", "enumerate(lines, 3)"),
            ("    if names[0] == names[1]:\n", "    if False:\n"),
            ("min(first, second), max(first, second)", "first, second"),
            ("    _check_once(indices, [*lines])\n", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/pairs.py",
        "data/test_sizes.py",
        [("    check_file(path)\n", "")],
    ),
    Mutants(
        "fedfr_jax/files.py",
        "data/test_sizes.py",
        [
            ("if not stat.S_ISREG(state.st_mode):", "if False:"),
            ("check_file(path, MAX_LIST_BYTES)", "check_file(path)"),
            ("    check_list(path)\n    try", "    try"),
            ("sum(_unpacked_sizes(path).values())", "0"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/partition/natural.py",
        "data/test_sizes.py",
        [('    check_members(path, keys.split("+"))\n', "")],
    ),
    Mutants(
        "fedfr_jax/data/sources/decoding.py",
        "data/test_sizes.py",
        [("        check_pixels(*image.size, origin)\n", "")],
    ),
    Mutants(
        "fedfr_jax/data/sources/decoding.py",
        "data/test_images.py",
        [
            ("6: Image.Transpose.ROTATE_270", "6: Image.Transpose.ROTATE_90"),
            ("in (5, 6, 7, 8)", "in (5, 6, 7)"),
            (", formats=FORMATS)", ")"),
            ("image = ImageOps.invert(image)", "pass"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/decoding.py",
        "deploy/test_use.py::test_the_center_keeps_the_shape_across_and_down",
        [
            ("(image.width - inside[0]) // 2", "0"),
            ("(image.height - inside[1]) // 2", "0"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/data.py",
        "contracts/test_preprocessing.py",
        [
            ("default.std, **settings})", "default.std})"),
            ("if first and found != how:", "if False:"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/classification_sets.py",
        "data/test_sizes.py",
        [
            ("*filter(None, (cameras, is_test))]", "*filter(None, (cameras,))]"),
            ("*filter(None, (cameras, is_test))]", "*filter(None, (is_test,))]"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/classification_sets.py",
        "data/test_sources_arrays.py",
        [
            ('check_unique(rows, "label", table)', "dict(rows)"),
            (
                '(((name, label) for label, name in rows), "character", table)',
                "((), '', '')",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/folder.py",
        "data/test_sources_folder.py",
        [('check_unique(named, "image", path)', "dict(named)")],
    ),
    Mutants(
        "fedfr_jax/data/sources/reid.py",
        "data/test_reid_sources.py",
        [("        if not person:\n", "        if False:\n")],
    ),
    Mutants(
        "fedfr_jax/json_files.py",
        "data/test_sizes.py",
        [("    check_list(path)\n    return parse", "    return parse")],
    ),
    Mutants(
        "fedfr_jax/data/sources/npz.py",
        "data/test_sizes.py",
        [("    check_file(cache)\n", "")],
    ),
    Mutants(
        "fedfr_jax/data/sources/recordio.py",
        "data/test_sizes.py",
        [
            (" & (part + 8 + length <= len(data))", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/recordio.py",
        "data/test_sizes.py",
        [
            ("    check_file(path, MAX_PROPERTY_BYTES)\n", ""),
            ("    check_file(path)\n", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/image_files.py",
        "data/test_sizes.py",
        [("check_file(path / name, MAX_IMAGE_BYTES)", "check_file(path / name)")],
    ),
    Mutants(
        "fedfr_jax/data/augment/geometry.py",
        "data/test_augment.py",
        [
            ("image=lambda image: image[:, ::-1],", "image=lambda image: image[::-1],"),
            ("[width - 1 - x, y]", "[width - x, y]"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/augment/photometric.py",
        "data/test_augment_pixels.py",
        [("image.shape[-1]) / deviation", "image.shape[-1])")],
    ),
    Mutants(
        "fedfr_jax/data/sources/folder.py",
        "data/test_sources_folder.py",
        [
            ("(identities), key=natural_key)", "(identities))"),
            ('match["test"] is not None', 'match["test"] is None'),
            ("points = rescale_points(points, first_size, size)", "pass"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/image_files.py",
        "data/test_sources_folder.py",
        [
            ("return not is_hidden and parts", "return parts"),
            ('SYSTEM_FOLDERS = ("@eaDir", ', "SYSTEM_FOLDERS = ("),
            ("if normalize_unicode(name) not in existing:", "if False:"),
            ("[] if used is None else", "[] if True else"),
            ("_inode(entry.stat())", "device, entry.inode()"),
            ("if os.path.samefile(first, second):", "if False:"),
        ],
    ),
    Mutants(
        "fedfr_jax/files.py",
        "data/test_sources_folder.py",
        [
            ('encoding="utf-8-sig"', 'encoding="utf-8"'),
            ('normalize("NFC", text)', 'normalize("NFD", text)'),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/segmentation.py",
        "data/test_masks.py",
        [("if not len(missing):", "if True:")],
    ),
    Mutants(
        "fedfr_jax/data/sources/zip_files.py",
        "data/test_sources_folder.py",
        [
            ("if name in members:", "if False:"),
            ('part not in ("", ".")', 'part != "."'),
            ('part not in ("", ".")', 'part != ""'),
            ("is_of_windows = member.create_system == 0", "is_of_windows = True"),
            ("is_of_windows = member.create_system == 0", "is_of_windows = False"),
            ('if name.startswith("/") or ".."', 'if ".."'),
            (' or ".." in (*folders, last)', ""),
            ("if count not in (", "if None in ("),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/selection.py",
        "data/test_sources_folder.py",
        [("min_images: Whole", "min_images: int")],
    ),
    Mutants(
        "fedfr_jax/data/sources/packed.py",
        "data/test_packed.py",
        [
            (
                "file_rows = rows[positions] - number * size",
                "file_rows = rows[positions] % 2",
            ),
            (
                "if is_read and digest_of_file",
                "if False and digest_of_file",
            ),
            (
                "if not _is_whole(folder / name, done.get(name)):",
                "if name not in done:",
            ),
            ('        roles=arrays.get("roles"),\n', ""),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/packed.py",
        "data/test_packed.py",
        [("if not 0 < header < MAX_HEADER_BYTES:", "if False:")],
    ),
    Mutants(
        "fedfr_jax/data/sources/packed.py",
        "data/test_packed.py",
        [("source.cameras.astype", "source.labels.astype")],
    ),
    Mutants(
        "fedfr_jax/data/sources/npz.py",
        "data/test_recordio.py",
        [
            ('np.array_equal(arrays.pop("stamp"), stamp)', 'len(arrays.pop("stamp"))'),
            ("and fits(arrays)", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/recordio.py",
        "data/test_recordio.py",
        [
            (
                "labels is None or (labels[probes] != header_labels).any()",
                "labels is None",
            ),
            ("if is_numbered and not is_own.all():", "if False:"),
            ("last = int(np.argmax(index.offsets))", "last = 0"),
            ("if not header.label[0] < 2**24:", "if False:"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/recordio.py",
        "data/test_recordio.py",
        [
            ("return MAGIC_BYTES.join(parts)", 'return b"".join(parts)'),
            ("np.where(fields[:, 2] > 0, 8, 3)", "np.where(fields[:, 2] > 0, 3, 3)"),
            ("flag not in ((2, 3) if parts else (0, 1))", "flag > 3"),
            ("if flag in (0, 3):", "if flag == 0 or parts[1:]:"),
        ],
    ),
]
