//! Many managers of different shape in one process.
//!
//! Goal: managers are independent of each other; each keeps its contents while others work; a
//! closed one leaves nothing mapped.
//!
//! Method: eight managers at once, of every page size, one to eight CPUs, both kinds of slots, with
//! and without a limit, each used by one program, in turn. Then the process's mappings are compared
//! with the former places of their memory, and with earlier mappings.

mod program;

use core::ops::Range;
use neap::mm::{Hooks, Mm};
use neap::options::Options;
use neap_base::Platform;
use neap_testing::shared::Shared;
use neap_testing::virtual_platform::Virtual;
use program::{OPTIONS, Opened, Program, Request, linux};

/// A manager and its program, whatever the platform.
trait Instance {
    fn step(&mut self, step: usize);
    fn verify(&self);
    /// Frees everything and closes the manager. Returns the range of its memory.
    fn end(&mut self) -> Range<usize>;
}

struct Owned<P: Platform + 'static> {
    program: Option<Program<'static, P>>,
    mm: *mut Opened<P>,
    /// The range of its memory.
    span: Option<Range<usize>>,
}

impl<P: Platform + 'static> Owned<P> {
    fn boxed(platform: P, options: &Options) -> Box<dyn Instance> {
        let mm = Box::into_raw(Box::new(Opened::new(platform, options).unwrap()));
        // SAFETY: the manager outlives the program: `end` takes them in this order.
        let program = Some(Program::new(unsafe { &(*mm).0 }));
        Box::new(Owned { program, mm, span: None })
    }
}

impl<P: Platform + 'static> Instance for Owned<P> {
    fn step(&mut self, step: usize) {
        let program = self.program.as_mut().unwrap();
        let size = [16, 100, 700, 5000, 40_000, 300_000][step % 6];
        Virtual::run_on(step / 3);
        if program.allocate(Request { size, align: 1 << (step % 13), zeroed: step.is_multiple_of(3) }) {
            let (low, high) = (*program.blocks.keys().next().unwrap(), *program.blocks.keys().next_back().unwrap());
            let before = self.span.take().unwrap_or(low..high);
            self.span = Some(before.start.min(low)..before.end.max(high + size));
        }
        if step % 5 > 2
            && let Some(start) = program.choose(step * 7919)
        {
            program.free(start);
        }
        if step % 7 == 3
            && let Some(start) = program.choose(step * 104_729)
        {
            _ = program.reallocate(start, size * 2);
        }
        if step % 50 == 49 {
            program.mm.tick(step as u64 * 1_000_000);
        }
    }

    fn verify(&self) {
        self.program.as_ref().unwrap().verify();
    }

    fn end(&mut self) -> Range<usize> {
        self.program.take().unwrap().end();
        // SAFETY: made in `boxed`, and no longer borrowed.
        drop(unsafe { Box::from_raw(self.mm) });
        self.span.take().expect("it had some memory")
    }
}

fn eight() -> Vec<Box<dyn Instance>> {
    let machine = |page_size, cpus| Shared::new(Virtual::new(page_size, cpus));
    let ((real, sequences), (same, locks)) = (linux(true), linux(false));
    let small = Options { limit: 3 << 20, ..OPTIONS };
    vec![
        Owned::boxed(machine(4 << 10, 1), &OPTIONS),
        Owned::boxed(real, &sequences),
        Owned::boxed(machine(64 << 10, 8), &OPTIONS),
        Owned::boxed(same, &locks),
        Owned::boxed(machine(16 << 10, 2), &small),
        Owned::boxed(linux(true).0, &Options { limit: 2 << 20, ..sequences }),
        Owned::boxed(
            Shared::new(Virtual::new(4 << 10, 3).with_scarce_address_space()),
            &Options { huge: false, ..OPTIONS },
        ),
        Owned::boxed(machine(64 << 10, 1), &small),
    ]
}

/// Bytes of address space of this process, and every mapping.
fn mappings() -> (usize, Vec<Range<usize>>) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let range = |line: &str| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        usize::from_str_radix(start, 16).unwrap()..usize::from_str_radix(end, 16).unwrap()
    };
    let all: Vec<Range<usize>> = maps.lines().map(range).collect();
    (all.iter().map(Range::len).sum(), all)
}

/// Interleaved work of eight managers. Returns the ranges of their memory.
fn round() -> Vec<Range<usize>> {
    let mut all = eight();
    for step in 0..600 {
        all.iter_mut().for_each(|instance| instance.step(step));
        if step % 200 == 199 {
            all.iter().for_each(|instance| instance.verify());
        }
    }
    all.iter_mut().map(|instance| instance.end()).collect()
}

#[test]
fn eight_managers_work_side_by_side_and_leave_nothing() {
    // After one round, the process's own mappings of first use are there.
    round();
    let (before, _) = mappings();
    for _ in 0..4 {
        let spans = round();
        let (_, mapped) = mappings();
        let overlap =
            |span: &Range<usize>| mapped.iter().find(|map| map.start < span.end && span.start < map.end).cloned();
        spans.iter().for_each(|span| assert_eq!(overlap(span), None, "{span:x?} was a manager's"));
    }
    let (after, _) = mappings();
    assert!(after <= before + (1 << 20), "{} bytes more are mapped after four rounds", after - before);
}

#[test]
fn a_manager_that_could_not_be_opened_opens_later() {
    use neap_testing::virtual_platform::Call;
    let machine = Shared::new(Virtual::new(4096, 2));
    machine.fail(Call::Map, 0, 1);
    assert!(Opened::new(machine.clone(), &OPTIONS).is_err());
    let mm = Opened::new(machine, &OPTIONS).unwrap();
    let mut program = Program::new(&mm);
    assert!(program.allocate(Request { size: 100, align: 1, zeroed: false }));
    program.end();
}

/// The first allocation of a process runs on the stack of any caller, and each page of it is a page
/// fault.
#[test]
fn a_manager_opens_on_a_small_stack() {
    let mut mm = Box::new(Mm::new(Hooks { open: |_| (), spawn: None, ticked: None }));
    let open = || {
        // SAFETY: the manager stays in its box until it is closed; the memory is this test's.
        unsafe {
            mm.open(Virtual::new(4096, 2), &OPTIONS).unwrap();
            mm.free(mm.allocate(100));
        }
    };
    std::thread::scope(|scope| {
        std::thread::Builder::new().stack_size(32 << 10).spawn_scoped(scope, open).unwrap().join().unwrap();
    });
    mm.verify(0).unwrap();
    // SAFETY: no memory of the manager is used any more.
    unsafe { mm.close() };
}
