//! Calls that a wrapper around a platform does not change.

/// Passes the calls of [`Platform`](neap_base::Platform) that wrappers do not change to the
/// platform in field `$inner`. For the `impl` of a wrapper around another platform.
#[macro_export]
macro_rules! hand_on {
    ($inner:ident) => {
        fn page_size(&self) -> usize {
            self.$inner.page_size()
        }

        fn address_hint(&self, attempt: u32, span: usize) -> Result<usize, ::neap_base::platform::Errno> {
            self.$inner.address_hint(attempt, span)
        }

        fn address_space_is_scarce(&self) -> bool {
            self.$inner.address_space_is_scarce()
        }

        fn is_grantable(&self, length: usize) -> bool {
            self.$inner.is_grantable(length)
        }

        fn huge_page_supply(&self) -> ::neap_base::platform::HugePageSupply {
            self.$inner.huge_page_supply()
        }

        fn map(&self, length: usize) -> Result<usize, ::neap_base::platform::Errno> {
            self.$inner.map(length)
        }

        fn reserve(&self, length: usize) -> Result<usize, ::neap_base::platform::Errno> {
            self.$inner.reserve(length)
        }

        unsafe fn open(&self, address: usize, length: usize) -> Result<(), ::neap_base::platform::Errno> {
            // SAFETY: the caller promises the contract of `Platform::open`, which is passed on.
            unsafe { self.$inner.open(address, length) }
        }

        unsafe fn unmap(&self, address: usize, length: usize) {
            // SAFETY: the caller promises the contract of `Platform::unmap`, which is passed on.
            unsafe { self.$inner.unmap(address, length) }
        }

        unsafe fn move_pages(&self, from: usize, to: usize, length: usize) -> Result<(), ::neap_base::platform::Errno> {
            // SAFETY: the caller promises the contract of `Platform::move_pages`, which is passed
            // on.
            unsafe { self.$inner.move_pages(from, to, length) }
        }

        fn nameable_cpus(&self) -> usize {
            self.$inner.nameable_cpus()
        }

        fn is_isolated(&self, cpu: usize) -> bool {
            self.$inner.is_isolated(cpu)
        }

        fn is_isolated_cpu_in_use(&self) -> bool {
            self.$inner.is_isolated_cpu_in_use()
        }

        fn nodes(&self) -> usize {
            self.$inner.nodes()
        }

        fn node(&self, cpu: usize) -> ::neap_base::platform::nodes::NearestNode {
            self.$inner.node(cpu)
        }

        fn each_home(&self, each: &mut dyn FnMut(usize, usize)) {
            self.$inner.each_home(each)
        }

        fn distance(&self, from: usize, to: usize) -> u8 {
            self.$inner.distance(from, to)
        }

        fn bind(&self, address: usize, length: usize, node: usize) -> Result<(), ::neap_base::platform::Errno> {
            self.$inner.bind(address, length, node)
        }

        fn rseq_offset(&self) -> Option<isize> {
            self.$inner.rseq_offset()
        }

        fn now(&self) -> u64 {
            self.$inner.now()
        }

        fn precise(&self) -> u64 {
            self.$inner.precise()
        }

        fn room(&self) -> Option<::neap_base::platform::Room> {
            self.$inner.room()
        }

        fn resident(&self) -> Option<u64> {
            self.$inner.resident()
        }
    };
}
