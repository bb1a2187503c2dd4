//! Released pages after ten of eleven owners end, and after the last: in both layouts, with many
//! CPUs and all page sizes.
//!
//! The machine is virtual, so pages may have any size. The sizes per owner are those of the
//! kernel's memory groups. The expected ratios follow from the geometry: an owner's data is 2048
//! bytes for each CPU.

use neap_percpu::{Layout, Owner, PerCpuData, Shape, Wait};
use neap_testing::virtual_platform::Virtual;

const SIZES: [usize; 5] = [1400, 600, 24, 8, 8];

struct Outcome {
    /// Populated pages at the start, with all owners, after ten of eleven have ended, and after the
    /// last.
    pages: [usize; 4],
    waste: f64,
    reserve: usize,
}

impl Outcome {
    fn ratio(&self) -> f64 {
        self.pages[1] as f64 / self.pages[2] as f64
    }
}

fn settle(data: &PerCpuData, machine: &Virtual) {
    for _ in 0..4 {
        data.tick(machine);
    }
    data.verify().unwrap_or_else(|finding| panic!("{finding}"));
}

fn run(shape: &Shape, owners: usize, goes: impl Fn(usize) -> bool, before: usize) -> Outcome {
    let machine = Virtual::new(4096, shape.cpus);
    let data = PerCpuData::open(&machine, shape, |_| 0, ()).unwrap();
    for _ in 0..before {
        data.allocate(&machine, Owner::NONE, 8, 8, Wait::Long).unwrap();
    }
    settle(&data, &machine);
    let populated = || data.statistics().populated;
    let start = populated();
    let make = |_| {
        let owner = data.open_owner(&machine).unwrap();
        for size in SIZES {
            data.allocate(&machine, owner, size, 8, Wait::Long).unwrap();
        }
        owner
    };
    let held: Vec<Owner> = (0..owners).map(make).collect();
    settle(&data, &machine);
    let full = data.statistics();
    let requested = owners * shape.cpus * SIZES.iter().sum::<usize>();
    let close = |going: bool| {
        for (at, owner) in held.iter().enumerate().filter(|(at, _)| goes(*at) == going) {
            // SAFETY: no code uses it any more.
            unsafe { data.close_owner(*owner) }.unwrap_or_else(|refused| panic!("{at}: {refused}"));
        }
        settle(&data, &machine);
        populated()
    };
    let (few, none) = (close(true), close(false));
    let waste = ((full.populated - start) * full.page) as f64 / requested as f64;
    // SAFETY: no code uses it any more.
    unsafe { data.close(&machine) };
    assert_eq!(machine.mapped_bytes(), 0);
    Outcome { pages: [start, full.populated, few, none], waste, reserve: full.reserve }
}

fn shape(layout: Layout, cpus: usize, page: usize) -> Shape {
    Shape { layout, page, span: 64 << 20, ..Shape::usual(cpus) }
}

#[test]
fn rows_return_what_geometry_permits() {
    // The number of owners keeps each run below about 100 MB.
    for (cpus, page, owners) in
        [(2, 4096, 5500), (3, 4096, 5500), (4, 4096, 5500), (32, 4096, 1100), (224, 4096, 220), (32, 65536, 1100)]
    {
        for before in [0, 1] {
            let outcome = run(&shape(Layout::Rows, cpus, page), owners, |at| at % 11 != 0, before);
            let [start, full, few, none] = outcome.pages;
            println!(
                "{cpus} CPUs, {page}: {:?}, waste {:.3}, ratio {:.2}",
                outcome.pages,
                outcome.waste,
                outcome.ratio()
            );
            assert!(none <= start.max(outcome.reserve) + outcome.reserve, "{none} pages stay of {start}");
            let fixed = outcome.reserve + start;
            let ratio = (full - fixed.min(full)) as f64 / few.saturating_sub(fixed).max(1) as f64;
            let floor = if cpus == 3 { 4.0 } else { 10.0 };
            assert!(ratio >= floor, "{cpus} CPUs, pages of {page}: {ratio:.2} x");
            assert!(outcome.waste <= 1.10 + fixed as f64 / full as f64, "waste {}", outcome.waste);
        }
    }
}

#[test]
fn cpu_major_returns_as_little_as_the_kernel() {
    let outcome = run(&shape(Layout::CpuMajor, 2, 4096), 5500, |at| at % 11 != 0, 0);
    println!("{:?}, ratio {:.2}", outcome.pages, outcome.ratio());
    assert!((3.0..5.0).contains(&outcome.ratio()), "{:.2} x", outcome.ratio());
    let outcome = run(&shape(Layout::CpuMajor, 2, 65536), 5500, |at| at % 11 != 0, 0);
    println!("{:?}, ratio {:.2}", outcome.pages, outcome.ratio());
    assert!(outcome.ratio() < 1.1, "{:.2} x", outcome.ratio());
}

/// A page of 64 KiB holds 16 owners of 2 CPUs.
#[test]
fn on_large_pages_the_order_of_deletion_decides() {
    let shape = shape(Layout::Rows, 2, 65536);
    let in_order = run(&shape, 5500, |at| at % 11 != 0, 0);
    let in_blocks = run(&shape, 5500, |at| at >= 500, 0);
    println!("{:?} {:?}", in_order.pages, in_blocks.pages);
    assert!(in_order.ratio() < 1.1 && in_blocks.ratio() > 6.0, "{} and {}", in_order.ratio(), in_blocks.ratio());
}
