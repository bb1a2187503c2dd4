import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;

/** Buffers outside of the heap of Java, of another size in each turn. Arguments: bytes of the limit. */
public class Buffers {
    static final int[] SIZES = {2000, 30000, 8000, 100000, 4000, 300000};
    /** Bytes of a buffer beside its memory. */
    static final int BESIDE = 200;

    static void fill(long bytes, int size) {
        List<ByteBuffer> buffers = new ArrayList<>();
        for (long left = bytes; left > 0; left -= size + BESIDE) {
            buffers.add(ByteBuffer.allocateDirect(size));
        }
    }

    public static void main(String[] arguments) throws InterruptedException {
        long limit = Long.parseLong(arguments[0]);
        double slowest = 0;
        try {
            for (int size : SIZES) {
                long began = System.nanoTime();
                fill(limit / 5 * 3, size);
                slowest = Math.max(slowest, (System.nanoTime() - began) / 1e6);
                // The memory of collected buffers is freed by a thread.
                for (int turn = 0; turn < 3; turn++) {
                    System.gc();
                    Thread.sleep(50);
                }
            }
            System.out.println("survived " + slowest);
        } catch (OutOfMemoryError error) {
            System.out.println("refused");
        }
    }
}
