// Just enough of the .npy format to take one row out of a file without reading the rest of it.

const MAGIC = [0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59];
const SIZES = { f2: 2, f4: 4, f8: 8 };
const NAMES = { f2: "float16", f4: "float32", f8: "float64" };
const HEAD = 1036; // bytes: the longest that the server reads

// What the file holds, or null if it is not rows of floats: the server then says what is wrong.
export async function read(file) {
  const head = new Uint8Array(await file.slice(0, HEAD).arrayBuffer());
  if (head.length < 12 || !MAGIC.every((byte, at) => head[at] === byte)) return null;
  const short = head[6] === 1;
  const view = new DataView(head.buffer);
  const begin = short ? 10 : 12;
  const start = begin + (short ? view.getUint16(8, true) : view.getUint32(8, true));
  const text = new TextDecoder("latin1").decode(head.slice(begin, start));
  const descr = /'descr':\s*'([<>])(f[248])'/.exec(text);
  const shape = /'shape':\s*\((\d+),?\s*(\d+)?\s*,?\s*\)/.exec(text);
  if (!descr || !shape || !/'fortran_order':\s*False/.test(text)) return null;
  const flat = shape[2] === undefined;
  const rows = flat ? 1 : Number(shape[1]);
  const width = Number(flat ? shape[1] : shape[2]);
  const rowBytes = width * SIZES[descr[2]];
  if (!rows || !width || file.size !== start + rows * rowBytes) return null;
  return {
    file,
    descr: descr[1] + descr[2],
    dtype: NAMES[descr[2]],
    rows,
    width,
    flat,
    start,
    rowBytes,
  };
}

// The file as it is if it is one row already; otherwise a file with one row of it, unchanged.
export async function row(npy, number) {
  if (npy.rows === 1 && !npy.flat) return npy.file.arrayBuffer();
  const begin = npy.start + number * npy.rowBytes;
  const content = await npy.file.slice(begin, begin + npy.rowBytes).arrayBuffer();
  return new Blob([header(npy.descr, npy.width), content]).arrayBuffer();
}

function header(descr, width) {
  const facts = `{'descr': '${descr}', 'fortran_order': False, 'shape': (1, ${width}), }`;
  const padded = facts.padEnd(64 * Math.ceil((10 + facts.length + 1) / 64) - 11) + "\n";
  const bytes = new Uint8Array(10 + padded.length);
  bytes.set([...MAGIC, 1, 0, padded.length & 255, padded.length >> 8]);
  bytes.set(new TextEncoder().encode(padded), 10);
  return bytes;
}
