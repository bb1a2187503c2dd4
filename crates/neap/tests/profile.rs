//! Samples of allocations, read in the process that takes them, through the file of its page.
//!
//! Method: the whole process samples, so the cases run one after the other, each in a thread that
//! has drawn no number before.

use core::alloc::{GlobalAlloc, Layout};
use neap_base::packed_stack::unpack;
use neap_base::profile_area::{
    ALLOC, AllocRecord, BLOCK_BYTES, CELL_BYTES, CELLS_AT, FILE_OFFSET, FORMAT, FREE, FreeRecord, HEADER_BYTES, MAGIC,
    MOST_STACK, PAD, RING_AT, RING_BYTES, SLOT_COUNT, SLOTS_AT,
};
use neap_testing::child::in_child;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};

#[global_allocator]
static ALLOCATOR: neap::Neap = neap::Neap;

/// Uses the manager before the harness has a second thread, so that it has a page.
extern "C" fn use_early() {
    drop(core::hint::black_box(Box::new(1)));
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = use_early;

/// A case that samples.
struct Sampling {
    file: File,
}

#[test]
fn samples_are_taken_kept_and_ended() {
    let cases: [(&str, fn()); 8] = [
        ("live samples estimate what is live", live_samples_estimate_what_is_live),
        ("records have the stack and tell frees", records_have_the_stack_and_tell_frees),
        ("realloc ends a sample and may begin one", realloc_ends_a_sample_and_may_begin_one),
        (
            "what was sampled is freed after sampling ended and groups pay for it",
            samples_freed_after_sampling_uncharge_their_group,
        ),
        ("the area takes memory only while it is used", the_area_takes_memory_only_while_it_is_used),
        ("a live stack outlasts the ring, in a child too", a_live_stack_outlasts_the_ring_in_a_child_too),
        ("a forked child has samples of its own", a_forked_child_has_samples_of_its_own),
        ("threads sample at once", threads_sample_at_once),
    ];
    for (name, case) in cases {
        println!("{name}");
        std::thread::spawn(case).join().unwrap_or_else(|_| panic!("{name}"));
    }
}

/// Records of samples, each with its stack.
type Samples = Vec<(Seen, AllocRecord, Vec<u8>)>;

/// A sample, from a slot or a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    number: u64,
    address: u64,
    size: u64,
    group: u64,
}

impl Sampling {
    fn begin(mean: &str) -> Sampling {
        neap::set("profile", mean).unwrap();
        Sampling { file: own_page(None) }
    }

    fn word(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, (FILE_OFFSET + at) as u64).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn head(&self) -> u64 {
        self.word(24)
    }

    /// The live samples, by their addresses.
    fn slots(&self) -> HashMap<u64, Seen> {
        let mut bytes = vec![0; SLOT_COUNT * 64];
        self.file.read_exact_at(&mut bytes, (FILE_OFFSET + SLOTS_AT) as u64).unwrap();
        let words = |slot: &[u8]| {
            core::array::from_fn::<u64, 8, _>(|n| u64::from_ne_bytes(slot[n * 8..][..8].try_into().unwrap()))
        };
        let slots = bytes.chunks_exact(64).map(words).filter(|slot| slot[0] > 0);
        slots.map(|s| (s[1], Seen { number: s[0], address: s[1], size: s[2], group: s[5] })).collect()
    }

    /// The records from a position of the ring on: samples with their stacks, and numbers of freed
    /// samples.
    fn records(&self, from: u64) -> (Samples, HashSet<u64>) {
        let (mut at, head) = (from, self.head());
        assert!(head - from <= RING_BYTES as u64, "the test reads what was overwritten");
        let (mut samples, mut freed) = (Vec::new(), HashSet::new());
        while at < head {
            let place = (FILE_OFFSET + RING_AT) as u64 + at % RING_BYTES as u64;
            let mut start = [0; 8];
            self.file.read_exact_at(&mut start, place).unwrap();
            let [kind, bytes] = [0, 4].map(|n| u32::from_ne_bytes(start[n..][..4].try_into().unwrap()));
            let mut record = vec![0_u8; bytes as usize];
            self.file.read_exact_at(&mut record, place).unwrap();
            assert!(bytes % 8 == 0 && at % BLOCK_BYTES as u64 + u64::from(bytes) <= BLOCK_BYTES as u64);
            match kind {
                ALLOC => {
                    // SAFETY: the record is as long, and plain numbers.
                    let r = unsafe { record.as_ptr().cast::<AllocRecord>().read_unaligned() };
                    let stack = record[size_of::<AllocRecord>()..].to_vec();
                    assert_eq!(stack.len(), r.stack_bytes as usize);
                    let seen = Seen { number: r.number, address: r.address, size: r.size, group: r.group };
                    samples.push((seen, r, stack));
                }
                // SAFETY: the record is as long, and plain numbers.
                FREE => _ = freed.insert(unsafe { record.as_ptr().cast::<FreeRecord>().read_unaligned() }.number),
                other => assert_eq!(other, PAD),
            }
            at += u64::from(bytes);
        }
        (samples, freed)
    }
}

impl Drop for Sampling {
    fn drop(&mut self) {
        neap::set("profile", "off").unwrap();
        verify();
    }
}

/// Verifies the manager. Threads that have ended their work may be inside a call, until they have
/// ended; a fault stays.
fn verify() {
    let mut verified = neap::process::PROCESS.verify(0);
    for _ in 0..400 {
        if verified.is_ok() {
            break;
        }
        std::thread::sleep(core::time::Duration::from_millis(5));
        verified = neap::process::PROCESS.verify(0);
    }
    verified.unwrap();
}

/// Opens the page of this process, which is not `parents`.
fn own_page(parents: Option<&File>) -> File {
    let inode = |file: fs::Metadata| file.ino();
    let parents = parents.map(|file| inode(file.metadata().unwrap()));
    let is_page = |path: &fs::DirEntry| {
        fs::read_link(path.path()).is_ok_and(|link| link.as_os_str() == "/memfd:neap-stat (deleted)")
            && fs::metadata(path.path()).ok().map(inode) != parents
    };
    let path = fs::read_dir("/proc/self/fd").unwrap().flatten().find(is_page).expect("the process has a page").path();
    File::open(path).unwrap()
}

/// Estimated bytes of samples: each stands for its size divided by its probability.
fn estimate<'a>(samples: impl Iterator<Item = &'a Seen>, mean: f64) -> f64 {
    samples.map(|seen| seen.size as f64 / -(-(seen.size as f64) / mean).exp_m1()).sum()
}

fn allocate(size: usize, align: usize) -> *mut u8 {
    // SAFETY: the layout is valid and not empty.
    let block = unsafe { ALLOCATOR.alloc(Layout::from_size_align(size, align).unwrap()) };
    assert!(!block.is_null());
    block
}

fn free(block: *mut u8, size: usize, align: usize) {
    // SAFETY: the test allocated the block with this layout.
    unsafe { ALLOCATOR.dealloc(block, Layout::from_size_align(size, align).unwrap()) };
}

fn live_samples_estimate_what_is_live() {
    const MEAN: f64 = 16_384.0;
    let sampling = Sampling::begin("16k");
    assert_eq!(sampling.word(0), MAGIC);
    assert_eq!((sampling.word(8) as u32, sampling.word(8) >> 32, sampling.word(16)), (FORMAT, 1, 16_384));
    let before = sampling.slots();
    // Small and aligned objects, runs, and what is zeroed.
    for (size, align, count) in
        [(48, 8, 200_000), (1000, 8, 20_000), (512, 512, 40_000), (40_000, 8, 500), (3 << 20, 8, 20)]
    {
        let blocks: Vec<_> = (0..count).map(|_| allocate(size, align)).collect();
        let known: HashSet<_> = blocks.iter().map(|block| block.addr() as u64).collect();
        let is_of_test = |seen: &Seen| known.contains(&seen.address) && seen.size == size as u64;
        let of_test = || sampling.slots().into_values().filter(is_of_test).collect::<Vec<_>>();
        let seen = of_test();
        assert!(seen.iter().all(|seen| seen.group == 0));
        let (truth, estimate) = ((size * count) as f64, estimate(seen.iter(), MEAN));
        // Five standard deviations, which are about 1 in the square root of the count of samples.
        let wrong = (estimate / truth - 1.0).abs();
        assert!(wrong < 5.0 / (truth / MEAN).sqrt(), "{size} bytes: {estimate} for {truth}");
        for (n, block) in blocks.iter().enumerate().filter(|(n, _)| n % 2 == 0) {
            free(*block, size, align);
            assert!(n % 1000 > 0 || !sampling.slots().contains_key(&(block.addr() as u64)));
        }
        assert!(of_test().len() < seen.len() && seen.len() > 10);
        blocks.iter().skip(1).step_by(2).for_each(|block| free(*block, size, align));
        assert_eq!(of_test(), []);
    }
    let kept = sampling.slots();
    assert!(kept.len() <= before.len() + 50, "what the test itself has");
}

#[inline(never)]
fn marked(value: u64, kept: &mut Vec<*mut u8>) {
    let marks = core::hint::black_box([value; 40]);
    kept.push(allocate(9000, 8));
    assert_eq!(core::hint::black_box(marks)[7], value);
}

fn records_have_the_stack_and_tell_frees() {
    const MARK: u64 = 0x1234_5678_9abc_def0;
    let sampling = Sampling::begin("64k");
    let (from, mut kept) = (sampling.head(), Vec::with_capacity(3000));
    (0..3000).for_each(|_| marked(MARK, &mut kept));
    let (samples, _) = sampling.records(from);
    let of_test: Vec<_> = samples.iter().filter(|(seen, ..)| seen.size == 9000).collect();
    assert!(of_test.len() > 200, "{}", of_test.len());
    let numbers: Vec<_> = samples.iter().map(|(seen, ..)| seen.number).collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "none is missing");
    let thread = neap_os::thread::id();
    for (seen, record, stack) in &of_test {
        assert!(kept.iter().any(|block| block.addr() as u64 == seen.address));
        assert_eq!((record.thread, record.mean, record.stack_pointer % 8), (thread, 64 << 10, 0));
        let words: Vec<_> = stack.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
        assert!(words.windows(40).any(|words| words == [MARK; 40]), "the caller's frame is in the copy");
    }
    kept.iter().for_each(|block| free(*block, 9000, 8));
    let (_, freed) = sampling.records(from);
    assert!(of_test.iter().all(|(seen, ..)| freed.contains(&seen.number)));
}

fn realloc_ends_a_sample_and_may_begin_one() {
    let sampling = Sampling::begin("1k");
    let layout = Layout::from_size_align(100_000, 8).unwrap();
    let mut block = allocate(layout.size(), 8);
    let first = sampling.slots()[&(block.addr() as u64)];
    assert_eq!(first.size, 100_000);
    let mut size = layout.size();
    for new in [200_000, 3 << 20, 90_000, 500, 100_000] {
        // SAFETY: the test allocated the block, with `size` bytes.
        block = unsafe { ALLOCATOR.realloc(block, Layout::from_size_align(size, 8).unwrap(), new) };
        size = new;
        let slots = sampling.slots();
        let of_block: Vec<_> = slots.values().filter(|seen| seen.address == block.addr() as u64).collect();
        // 500 bytes are sampled with a probability of 0.39.
        assert!(of_block.iter().all(|seen| seen.size == size as u64) && (of_block.len() == 1 || size == 500));
        assert!(slots.values().all(|seen| seen.number != first.number));
    }
    free(block, size, 8);
}

fn samples_freed_after_sampling_uncharge_their_group() {
    let group = neap::groups::Group::create("sampled").unwrap();
    let (blocks, runs) = {
        let sampling = Sampling::begin("1k");
        let (mut blocks, mut runs) = (Vec::with_capacity(5000), Vec::with_capacity(5));
        let inside = group.enter().unwrap();
        blocks.extend((0..5000).map(|_| allocate(600, 8)));
        runs.extend((0..5).map(|_| allocate(100_000, 8)));
        drop(inside);
        let slots = sampling.slots();
        let of_group = slots.values().filter(|seen| seen.group == group.id().to_bits()).count();
        assert!(of_group > 1500, "{of_group}");
        assert!(group.used().unwrap() >= 5000 * 600 + 5 * 100_000);
        // Some frees while sampling is on.
        blocks[..2500].iter().for_each(|block| free(*block, 600, 8));
        let after = sampling.slots().values().filter(|seen| seen.group == group.id().to_bits()).count();
        assert!(after < of_group * 6 / 10, "{after} of {of_group}");
        (blocks.split_off(2500), runs)
    };
    assert_eq!(own_page_word(0), 0, "no area any more");
    blocks.iter().for_each(|block| free(*block, 600, 8));
    runs.iter().for_each(|block| free(*block, 100_000, 8));
    assert_eq!(group.used().unwrap(), 0);
}

fn own_page_word(at: usize) -> u64 {
    let mut bytes = [0; 8];
    own_page(None).read_exact_at(&mut bytes, (FILE_OFFSET + at) as u64).unwrap();
    u64::from_ne_bytes(bytes)
}

fn the_area_takes_memory_only_while_it_is_used() {
    let blocks = || {
        let status = own_page(None).metadata().unwrap();
        status.blocks() * 512
    };
    let _sampling = Sampling::begin("4k");
    (0..2000).for_each(|_| free(allocate(4000, 8), 4000, 8));
    assert!(blocks() > (HEADER_BYTES + (1 << 20)) as u64, "{}", blocks());
    neap::set("profile", "off").unwrap();
    assert!(blocks() < 1 << 20, "{}", blocks());
}

/// Allocates, and fills the ring by samples that are freed at once. Returns whether the first
/// allocation's stack is kept.
fn outlasts(sampling: &File) -> bool {
    let read = |at: usize, bytes: &mut [u8]| sampling.read_exact_at(bytes, (FILE_OFFSET + at) as u64).unwrap();
    let words = |bytes: &[u8]| -> Vec<u64> {
        bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect()
    };
    let head = || {
        let mut head = [0; 8];
        read(24, &mut head);
        u64::from_ne_bytes(head)
    };
    let block = allocate(60_000, 8);
    let end = head() + 2 * RING_BYTES as u64;
    while head() < end {
        (0..100).for_each(|_| free(allocate(40_000, 8), 40_000, 8));
    }
    let mut bytes = vec![0; SLOT_COUNT * 64];
    read(SLOTS_AT, &mut bytes);
    let slots: Vec<_> = bytes.chunks_exact(64).map(words).filter(|slot| slot[0] > 0).collect();
    let of_block = slots.iter().find(|slot| slot[1] == block.addr() as u64).expect("60 000 bytes are sampled");
    let (mut link, mut stream) = (of_block[6] >> 32, Vec::new());
    while link > 0 {
        let mut cell = [0; CELL_BYTES];
        read(CELLS_AT + (link as usize - 1) * CELL_BYTES, &mut cell);
        let cell = words(&cell);
        link = cell[0];
        stream.extend(&cell[1..]);
    }
    let mut stack = vec![0; MOST_STACK / 8];
    let unpacked = unpack(&mut stream.into_iter(), &mut stack);
    free(block, 60_000, 8);
    let code = outlasts as *const () as u64;
    unpacked.is_some_and(|of| of.words > 16) && stack.iter().any(|word| word.wrapping_sub(code) < 4096)
}

fn a_live_stack_outlasts_the_ring_in_a_child_too() {
    let sampling = Sampling::begin("1k");
    assert!(outlasts(&sampling.file));
    in_child(|| assert!(outlasts(&own_page(Some(&sampling.file)))));
    assert!(outlasts(&sampling.file));
}

fn a_forked_child_has_samples_of_its_own() {
    let sampling = Sampling::begin("1k");
    let kept: Vec<_> = (0..1000).map(|_| allocate(2000, 8)).collect();
    let taken = sampling.word(32);
    let has_its_own = || {
        let own = Sampling { file: own_page(Some(&sampling.file)) };
        let begins_new = own.slots().len() < 200 && own.word(32) < 200;
        kept.iter().for_each(|block| free(*block, 2000, 8));
        let blocks: Vec<_> = (0..100).map(|_| allocate(7000, 8)).collect();
        let seen = own.slots().values().filter(|seen| seen.size == 7000).count();
        let verified = neap::process::PROCESS.verify(0);
        let right = begins_new && seen > 90 && verified.is_ok();
        if !right {
            neap::say(format_args!("child: {begins_new}, {seen}, {verified:?}, {}", own.word(32)));
        }
        core::hint::black_box(blocks);
        assert!(right);
    };
    in_child(has_its_own);
    assert!(sampling.word(32) < taken + 500, "the child writes nothing into its parent's area");
    assert!(kept.iter().filter(|block| sampling.slots().contains_key(&(block.addr() as u64))).count() > 500);
    kept.iter().for_each(|block| free(*block, 2000, 8));
}

fn threads_sample_at_once() {
    let sampling = Sampling::begin("1k");
    let from = sampling.word(32);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                for round in 0..20_000_usize {
                    let size = 16 + (round * 37 + thread * 11) % 3000;
                    free(allocate(size, 8), size, 8);
                }
            });
        }
    });
    assert!(sampling.word(32) > from + 20_000);
}
