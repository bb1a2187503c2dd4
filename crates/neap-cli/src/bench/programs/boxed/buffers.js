// Buffers outside of the heap of JavaScript, of another size in each turn. Arguments: bytes of the
// container's limit.
const limit = Number(process.argv[2]);
const sizes = [500, 8000, 2000, 30000, 1000, 80000];
// Bytes of a buffer beside its memory, most of them in the heap.
const beside = 300;
let slowest = 0;

async function turn(size) {
  const began = performance.now();
  const count = Math.floor(limit * 0.6 / (size + beside));
  let buffers = [];
  for (let i = 0; i < count; i++) buffers.push(Buffer.allocUnsafeSlow(size).fill(i & 255));
  slowest = Math.max(slowest, performance.now() - began);
  buffers = null;
  // Memory of collected buffers is freed by tasks.
  for (let i = 0; i < 3; i++) {
    global.gc();
    await new Promise(resolve => setTimeout(resolve, 20));
  }
}

(async () => {
  try {
    for (const size of sizes) await turn(size);
    console.log('survived', slowest);
  } catch (error) {
    console.log('refused');
  }
})();
