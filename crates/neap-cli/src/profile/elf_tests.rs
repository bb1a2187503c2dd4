//! ELF files with random faults, as a hostile process may map them. Tests check that reading names
//! and unwind information does not panic, and ends.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::area::StackCopy;
use super::debug_lines::DebugLines;
use super::elf::{Budget, ElfImage};
use super::limits::ProfileLimits;
use super::symbol_table;
use super::unwind::addresses_in;
use crate::work::meter::Random;

const BUDGET: usize = ProfileLimits::OWN.file_bytes;

const SOURCE: &str = "
static inline int inner(int n) { return n * 3; }
__attribute__((noinline)) int middle(int n) { int numbers[100]; numbers[n % 100] = inner(n); return numbers[n % 50] + n; }
int main(int count, char **words) { int sum = 0; for (int n = 0; n < count * 5; n++) sum += middle(n); return sum; }
";

#[test]
fn mutated_files_are_read_without_a_panic() {
    let folder = std::env::temp_dir().join(format!("neap-elf-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (source, program) = (folder.join("small.c"), folder.join("small"));
    fs::write(&source, SOURCE).unwrap();
    let built = Command::new("cc").args(["-O2", "-g", "-w", "-o"]).args([&program, &source]).status();
    if !built.is_ok_and(|status| status.success()) {
        eprintln!("skipped: there is no C compiler");
        return;
    }
    let sound = fs::read(&program).unwrap();
    let seed = std::env::var("NEAP_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x1234_5678_9abc_def1_u64);
    println!("NEAP_SEED={seed}");
    let inputs = std::env::var("NEAP_INPUTS").ok().and_then(|inputs| inputs.parse().ok()).unwrap_or(400);
    let mut numbers = Random::new(seed);
    let mut random = || numbers.draw();
    let (mut opened, mut named, mut lined) = (0, 0, 0);
    for _ in 0..inputs {
        let mut bytes = sound.clone();
        for _ in 0..random() % 24 {
            let length = bytes.len() as u64;
            let at = match random() % 3 {
                0 => random() % 1024,
                1 => length - 1 - random() % 3000,
                _ => random() % length,
            };
            bytes[at as usize] =
                if random() % 2 == 0 { random() as u8 } else { [0, 1, 0x7f, 0x80, 0xff][(random() % 5) as usize] };
        }
        fs::write(&program, &bytes).unwrap();
        let Ok(image) = ElfImage::open(Path::new(&program), &Budget::new(BUDGET)) else { continue };
        opened += 1;
        let text = image.range(".text").unwrap_or(0x1000..0x2000);
        let mut places: Vec<u64> = (0..40).map(|_| text.start.wrapping_add(random() % 0x400)).collect();
        places.sort_unstable();
        symbol_table::names(&image, &places, &mut { u64::MAX }, &mut |_, _| named += 1);
        if let Ok(lines) = DebugLines::of(&fs::File::open(&program).unwrap()) {
            lined += usize::from(places.iter().any(|&place| !lines.at(place).is_empty()));
        }
        let stack: Vec<u8> = (0..512).map(|_| random() as u8).collect();
        for &instruction in &places {
            let stack_pointer = random() % 1000 * 8;
            let copy = StackCopy { instruction, stack_pointer, frame_pointer: stack_pointer + 64, bytes: &stack };
            assert!(addresses_in(&image, &copy).len() <= 512);
        }
    }
    fs::remove_dir_all(&folder).unwrap();
    let counts = format!("{opened} of {inputs} opened, {named} names, {lined} with lines");
    assert!(opened > inputs / 3 && named > inputs && lined > inputs / 8, "{counts}");
}
