//! A process at its own limit: before an allocation fails, caches shrink. Each test runs itself
//! again with `NEAP=limit`.

use neap::process::PROCESS;
use neap::reclaim::{self, Shrinker};
use std::process::Command;
use std::sync::{Arc, Mutex};

const BLOCK: usize = 256 << 10;

/// Runs this test in a process of its own. Returns whether this is that process.
fn is_own_process(test: &str) -> bool {
    if std::env::var_os("NEAP_TEST_OWN").is_some() {
        return true;
    }
    let mut own = Command::new(std::env::current_exe().unwrap());
    own.args(["--exact", test, "--nocapture"]).env("NEAP", "limit:64m,interval:10").env("NEAP_TEST_OWN", "1");
    let done = own.output().unwrap();
    let said = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(done.status.success(), "{said:?}");
    false
}

/// Blocks of the process's manager.
#[derive(Default)]
struct Blocks(Mutex<Vec<usize>>);

impl Blocks {
    fn len(&self) -> u64 {
        self.0.try_lock().map_or(0, |blocks| blocks.len() as u64)
    }

    fn held(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn put(&self) -> bool {
        let block = PROCESS.allocate(BLOCK);
        if !block.is_null() {
            // SAFETY: allocated above with this size.
            unsafe { block.write_bytes(1, BLOCK) };
            self.0.lock().unwrap().push(block.expose_provenance());
        }
        !block.is_null()
    }

    fn evict(&self, wanted: u64) -> u64 {
        let Ok(mut blocks) = self.0.try_lock() else { return 0 };
        let wanted = blocks.len().min(wanted as usize);
        for block in blocks.drain(..wanted) {
            // SAFETY: allocated by `put`, and popped above, so no other thread has it.
            unsafe { PROCESS.free(core::ptr::with_exposed_provenance_mut(block)) };
        }
        wanted as u64
    }
}

fn register(blocks: &Arc<Blocks>) -> Shrinker {
    let (counted, shrunk) = (blocks.clone(), blocks.clone());
    Shrinker::named("blocks").batch(4).register(move || counted.len(), move |wanted| shrunk.evict(wanted)).unwrap()
}

#[test]
fn an_allocation_beyond_the_limit_has_caches_shrink() {
    if !is_own_process("an_allocation_beyond_the_limit_has_caches_shrink") {
        return;
    }
    let blocks = Arc::new(Blocks::default());
    while blocks.put() {}
    let without = blocks.len();
    assert!((64..=256).contains(&without), "{without} fit");
    // A shrinker's own memory comes out of the budget.
    blocks.evict(8);
    let shrinker = register(&blocks);
    (0..1000).for_each(|round| assert!(blocks.put(), "{round}: {} are left", blocks.len()));
    assert!(blocks.len() <= without);
    // A request beyond the limit is refused without shrinking any cache: it would shrink this one
    // to nothing. Background reclaim takes a few blocks from it now and then.
    let is_left_alone = |_| {
        let before = blocks.held();
        assert!(PROCESS.allocate((64 << 20) + 1).is_null());
        before > 0 && blocks.held() == before
    };
    assert!((0..100).any(is_left_alone));
    drop(shrinker);
    while blocks.put() {}
    assert!(blocks.evict(u64::MAX).abs_diff(without) <= 8, "nothing was lost");
}

#[test]
fn tick_below_low_watermark_shrinks_caches_to_high() {
    if !is_own_process("tick_below_low_watermark_shrinks_caches_to_high") {
        return;
    }
    let blocks = Arc::new(Blocks::default());
    while blocks.put() {}
    blocks.evict(4);
    let full = blocks.len();
    let shrinker = register(&blocks);
    let end = std::time::Instant::now() + core::time::Duration::from_secs(30);
    while blocks.len() == full {
        assert!(std::time::Instant::now() < end, "no reclaimer has come");
        PROCESS.tick(0);
        std::thread::sleep(core::time::Duration::from_millis(1));
    }
    let mut is_known = false;
    reclaim::each_shrinker(|report| is_known |= report.name.as_str() == "blocks" && report.freed > 0);
    assert!(is_known);
    drop(shrinker);
    assert!(blocks.len() > full / 4, "{} of {full} are left: no more than is needed goes", blocks.len());
}
