//! A charge in the making: what is asked for, how long it may take, and why it was refused.
//!
//! # Design
//! [`Group::request`] collects the choices, which are independent of one another. The charge is made
//! by one of three ends: `now`, `wait` and `.await`.

use super::{Bytes, Charge, Group, Kind, Limit, made_or_here};
use crate::memory_groups::Grouped;
use crate::per_cpu_data::Source;
use crate::process::PROCESS;
use core::fmt;
use core::pin::Pin;
use core::task::{Context, Poll};
use core::time::Duration;
use neap_base::{Linux, Platform};
use neap_groups::{FOREVER, How, Payer, Refusal};

impl Group {
    /// Begins a charge of so many bytes.
    ///
    /// ```
    /// use core::time::Duration;
    /// use neap::groups::{Bound, ChargeError, Group};
    ///
    /// let pool = Group::create("requests")?;
    /// pool.set(Bound::Max, 1 << 20)?;
    /// let all = pool.request(1 << 20).now()?;
    /// assert!(matches!(pool.request(1).now(), Err(ChargeError::Limit(_))));
    /// let soon = Duration::from_millis(1);
    /// assert!(matches!(pool.request(1).deadline(soon).wait(), Err(ChargeError::Timeout(_))));
    /// assert!(matches!(pool.request(2 << 20).wait(), Err(ChargeError::TooLarge(_))));
    /// let more = pool.request(4096).node(0).overcharge().now()?;
    /// drop(all);
    /// let waited = pool.request(4096).wait()?;
    /// # drop((more, waited));
    /// pool.delete()?;
    /// assert_eq!(pool.request(1).now().unwrap_err(), ChargeError::Deleted);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub const fn request(self, bytes: u64) -> ChargeRequest {
        ChargeRequest { group: self, bytes, node: 0, inline: false, overcharge: false, time: None }
    }
}

/// A charge that is not made yet: [`Group::request`].
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is charged before now(), wait() or .await"]
pub struct ChargeRequest {
    group: Group,
    bytes: u64,
    node: usize,
    inline: bool,
    overcharge: bool,
    time: Option<Duration>,
}

impl ChargeRequest {
    /// The node that the memory is on: 0 unless said otherwise.
    pub const fn node(self, node: usize) -> Self {
        ChargeRequest { node, ..self }
    }

    /// That this thread holds nothing that shrinkers take: those that
    /// [allow](crate::reclaim::Builder::inline) it are called in this thread. A future calls none.
    pub const fn inline(self) -> Self {
        ChargeRequest { inline: true, ..self }
    }

    /// That the charge goes beyond a limit, where it is counted, and is not refused.
    pub const fn overcharge(self) -> Self {
        ChargeRequest { overcharge: true, ..self }
    }

    /// How long `wait` and `.await` may take, from their call on: for ever unless said otherwise.
    pub const fn deadline(self, time: Duration) -> Self {
        ChargeRequest { time: Some(time), ..self }
    }

    fn payer(&self) -> Payer {
        self.group.0.payer(Kind::ByHand, self.node)
    }

    fn grouped(&self) -> Result<Grouped<'static, Linux>, ChargeError> {
        made_or_here(self.group).map_err(|_| ChargeError::Deleted)
    }

    fn charged(&self) -> Charge {
        Charge { payer: self.payer(), bytes: self.bytes }
    }

    /// When the time is over, of the platform's clock.
    fn end(&self, platform: &Linux) -> u64 {
        let time = self.time.map_or(FOREVER, |time| u64::try_from(time.as_nanos()).unwrap_or(FOREVER));
        platform.now().saturating_add(time)
    }

    /// Charges, or refuses: beyond a `max` after reclaim, which takes 200 ms at most. Above a `high`
    /// it takes up to two seconds.
    ///
    /// # Errors
    /// See [`ChargeError`]; nothing is charged then. With [`ChargeRequest::overcharge`] only if the
    /// group is deleted, or all its bytes would be more than `i64::MAX`.
    #[inline]
    pub fn now(self) -> Result<Charge, ChargeError> {
        // What is stocked is had without a word of memory being passed on: the processor waits long for what was written and is read wider.
        if PROCESS.take_stocked(self.payer(), self.bytes) {
            return Ok(self.charged());
        }
        self.now_slowly()
    }

    #[cold]
    #[inline(never)]
    fn now_slowly(self) -> Result<Charge, ChargeError> {
        let grouped = self.grouped()?;
        let grouped = if self.inline { grouped.inline() } else { grouped };
        let how = if self.overcharge { How::Overcharge } else { How::Refuse };
        grouped.charge(self.payer(), self.bytes, how).map_err(|refusal| ChargeError::of(refusal, false))?;
        Ok(self.charged())
    }

    /// Charges, and waits for room where a limit is reached: the oldest first, with small ones
    /// passing now and then. The caller holds nothing that other threads need to make room.
    ///
    /// # Errors
    /// See [`ChargeError`]; nothing is charged then.
    pub fn wait(self) -> Result<Charge, ChargeError> {
        if self.overcharge {
            return self.now();
        }
        let grouped = self.grouped()?;
        let end = self.end(grouped.platform());
        if let Some(reclaiming) = PROCESS.reclaiming_if_made().filter(|_| self.inline) {
            reclaiming.make_room_inline(self.group.0, self.bytes, end);
        }
        let refused = |refusal| ChargeError::of(refusal, grouped.platform().now() >= end);
        grouped.charge_or_wait(self.payer(), self.bytes, end).map_err(refused)?;
        Ok(self.charged())
    }
}

/// [`ChargeRequest::wait`] as a future, which asks when it is first polled. Dropping it gives up.
impl IntoFuture for ChargeRequest {
    type Output = Result<Charge, ChargeError>;
    type IntoFuture = ChargeAsync;

    fn into_future(self) -> ChargeAsync {
        let waiting = self.grouped().ok().filter(|_| !self.overcharge).map(|grouped| {
            let end = self.end(grouped.platform());
            (grouped.charge_async(self.payer(), self.bytes, end), end)
        });
        ChargeAsync { request: self, waiting }
    }
}

/// A charge that waits for room. It is woken by neap's thread, or by a thread that
/// [ticks](crate::mm::Mm::tick) where there can be none.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct ChargeAsync {
    request: ChargeRequest,
    /// With the time when it ends. `None`: it does not wait.
    waiting: Option<(neap_groups::ChargeAsync<'static, Source<'static, Linux>>, u64)>,
}

impl Future for ChargeAsync {
    type Output = Result<Charge, ChargeError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let request = self.request;
        let Some((waiting, end)) = &mut self.waiting else { return Poll::Ready(request.now()) };
        let answer = core::task::ready!(Pin::new(waiting).poll(context));
        let is_over = || request.grouped().is_ok_and(|grouped| grouped.platform().now() >= *end);
        Poll::Ready(answer.map(|_| request.charged()).map_err(|refusal| ChargeError::of(refusal, is_over())))
    }
}

/// Why nothing was charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ChargeError {
    /// A limit was reached, and reclaim brought too little.
    Limit(Limit),
    /// A limit was reached until the deadline.
    Timeout(Limit),
    /// More bytes than the limit: waiting is in vain.
    TooLarge(Limit),
    /// The group is deleted.
    Deleted,
}

impl ChargeError {
    fn of(refusal: Refusal, is_late: bool) -> ChargeError {
        match refusal {
            Refusal::Limit(limit) if limit.need > limit.max => ChargeError::TooLarge(limit),
            Refusal::Limit(limit) if is_late => ChargeError::Timeout(limit),
            Refusal::Limit(limit) => ChargeError::Limit(limit),
            Refusal::Gone => ChargeError::Deleted,
        }
    }

    /// The limit that was reached; `None` if the group is deleted.
    pub fn limit(&self) -> Option<&Limit> {
        match self {
            ChargeError::Limit(limit) | ChargeError::Timeout(limit) | ChargeError::TooLarge(limit) => Some(limit),
            ChargeError::Deleted => None,
        }
    }

    /// Up to three groups that hold most of the memory below the limit, with their bytes, the
    /// largest first.
    pub fn holders(&self) -> impl Iterator<Item = (Group, u64)> {
        let holders = self.limit().map(|limit| limit.holders);
        holders.into_iter().flatten().flatten().map(|(id, bytes)| (Group(id), bytes))
    }
}

/// Names the group, its limit, what was needed, and who holds the memory.
impl fmt::Display for ChargeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(limit) = self.limit() else { return f.write_str("the group is deleted") };
        let &Limit { group, max, charged, need, .. } = limit;
        let [charged, max, need] = [charged, max, need].map(Bytes);
        write!(f, "{} has {charged} of {max} and is asked for {need} more", Group(group))?;
        match self {
            ChargeError::Timeout(_) => f.write_str(", until the deadline")?,
            ChargeError::TooLarge(_) => f.write_str(", which is more than its limit")?,
            _ => {}
        }
        for (separator, (holder, bytes)) in ["; held by ", ", ", ", "].into_iter().zip(self.holders()) {
            match holder.0 == group {
                true => write!(f, "{separator}itself ({})", Bytes(bytes))?,
                false => write!(f, "{separator}{holder} ({})", Bytes(bytes))?,
            }
        }
        Ok(())
    }
}

impl core::error::Error for ChargeError {}
