//! Callbacks that return, against threads that write them off.

use loom::sync::Arc;
use loom::thread;
use neap_reclaim::reclaim::callback_state::CallbackState;

/// Runs callbacks of shrinkers, one after the other. Returns which were written off.
fn run(seat: &CallbackState, shrinkers: [u64; 2]) -> [bool; 2] {
    assert!(seat.take(9));
    let heard = shrinkers.map(|shrinker| {
        seat.begin(shrinker, shrinker * 100);
        seat.end()
    });
    seat.leave();
    heard
}

/// Looks, and writes off the running callback. Returns its shrinker.
fn watch(seat: &CallbackState) -> Option<u64> {
    let running = seat.running()?;
    if !seat.write_off(&running) {
        return None;
    }
    assert_eq!((running.due, running.reclaimer), (running.shrinker * 100, 9), "of another call");
    Some(running.shrinker)
}

#[test]
fn write_off_is_reported_to_exactly_the_written_off_callback() {
    loom::model(|| {
        let seat = Arc::new(CallbackState::default());
        let watchers = [(); 2].map(|()| {
            let seat = seat.clone();
            thread::spawn(move || watch(&seat))
        });
        let heard = run(&seat, [1, 2]);
        let written_off = watchers.map(|watcher| watcher.join().unwrap());
        for (shrinker, heard) in [1, 2].into_iter().zip(heard) {
            let by = written_off.iter().filter(|&&off| off == Some(shrinker)).count();
            assert_eq!(by, usize::from(heard), "{written_off:?}");
        }
    });
}

#[test]
fn what_was_seen_of_one_thread_writes_off_nothing_of_the_next() {
    loom::model(|| {
        let seat = Arc::new(CallbackState::default());
        let watcher = {
            let seat = seat.clone();
            thread::spawn(move || watch(&seat))
        };
        let first = {
            let seat = seat.clone();
            thread::spawn(move || run(&seat, [1, 2]))
        };
        let mut heard = Vec::from(first.join().unwrap());
        heard.extend(run(&seat, [3, 4]));
        let written_off = watcher.join().unwrap();
        let expected = heard.iter().position(|&heard| heard).map(|at| at as u64 + 1);
        assert_eq!(written_off, expected, "{heard:?}");
        assert!(heard.iter().filter(|&&heard| heard).count() <= 1);
    });
}
